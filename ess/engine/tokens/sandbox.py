"""The processes in which grammars are compiled and followed, as their parent sees them.

`grammar_child` says what they do and what limits them. The first of them reads the vocabulary and
stays; it forks one for each grammar. Nothing here blocks for longer than `ANSWER_S`, and that only
if a process was stopped from outside: whatever a grammar does costs it its processor time first.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from ess.errors import Unavailable

ANSWER_S: Final = 10.0
START_S: Final = 60.0
_CHILD: Final = Path(__file__).with_name("grammar_child.py")
_PREFIX_BYTES: Final = 8


class Link:
    """A connection to such a process. OSError means that the process is lost."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        made.settimeout(ANSWER_S)
        self._read = bytearray()

    def send(self, message: dict[str, Any], *files: int) -> None:
        raw = json.dumps(message).encode()
        prefix = len(raw).to_bytes(_PREFIX_BYTES, "little")
        if files:
            socket.send_fds(self.socket, [prefix], files)
            prefix = b""
        self.socket.sendall(prefix + raw)

    def poll(self) -> tuple[dict[str, Any], bytes] | None:
        """The next answer if it is complete by now."""
        while select.select([self.socket], [], [], 0)[0]:
            if (answer := self._take()) is not None:
                return answer
        return None

    def ask(self, message: dict[str, Any], *files: int) -> tuple[dict[str, Any], bytes]:
        self.send(message, *files)
        deadline_s = time.monotonic() + ANSWER_S
        while (answer := self._take()) is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError
        return answer

    def _take(self) -> tuple[dict[str, Any], bytes] | None:
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise ConnectionResetError("the process has ended")
        self._read += piece
        start = _PREFIX_BYTES + int.from_bytes(self._read[:_PREFIX_BYTES], "little")
        if len(self._read) < max(start, _PREFIX_BYTES):
            return None
        answer: dict[str, Any] = json.loads(self._read[_PREFIX_BYTES:start])
        if len(self._read) < start + answer["raw"]:
            return None
        assert len(self._read) == start + answer["raw"], "an answer that nobody asked for"
        raw, self._read = bytes(self._read[start:]), bytearray()
        return answer, raw

    def close(self) -> None:
        self.socket.close()


class Sandbox:
    """The first process. It is started when it is first needed, and again when it was lost."""

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._is_ready = False
        self._deadline_s = 0.0
        self._failure_count = 0

    @property
    def waits_on(self) -> list[socket.socket]:
        return [self._link.socket] if self._link is not None and not self._is_ready else []

    def is_ready(self) -> bool:
        """Unavailable if it has failed to start twice."""
        if self._link is None:
            self._start()
        assert self._link is not None, "it was started"
        try:
            self._is_ready = self._is_ready or self._link.poll() is not None
            if not self._is_ready and time.monotonic() > self._deadline_s:
                raise TimeoutError
        except OSError:
            self.close()
            self._failure_count += 1
            if self._failure_count > 1:
                self._failure_count = 0
                raise Unavailable("the process that compiles grammars does not start") from None
            return False
        self._failure_count = 0 if self._is_ready else self._failure_count
        return self._is_ready

    def fork(self) -> tuple[Link, int]:
        """A process for one grammar, and its number."""
        assert self._link is not None, "it is ready"
        ours, theirs = socket.socketpair()
        try:
            answer, _ = self._link.ask({"verb": "fork"}, theirs.fileno())
        except OSError:
            ours.close()
            self.close()
            raise
        finally:
            theirs.close()
        return Link(ours), int(answer["process"])

    def end(self, process: int) -> int:
        """Which signal had ended it; 0 if none had, or if it cannot be said any more."""
        if self._link is None or not self._is_ready:
            return 0
        try:
            return int(self._link.ask({"verb": "end", "process": process})[0]["signal"])
        except OSError:
            self.close()
            return 0

    def close(self) -> None:
        """The processes of the grammars end too."""
        process, self._process = self._process, None
        link, self._link = self._link, None
        self._is_ready = False
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            file.write(self._vocabulary)
            file.seek(0)
            file.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD), str(file.fileno())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(file.fileno(),),
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self._link = Link(ours)
        self._deadline_s = time.monotonic() + START_S


def wait_for(sockets: list[socket.socket], seconds: float) -> None:
    with contextlib.suppress(OSError, ValueError):
        select.select(sockets, [], [], seconds)
