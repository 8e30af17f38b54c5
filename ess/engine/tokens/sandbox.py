"""The processes in which grammars are compiled and followed, as their parent sees them.

`grammar_child` says what they do and what limits them. The first of them reads the vocabulary and
stays; it forks a process for each grammar, ahead, for a large process takes long to fork. Nothing
here blocks for longer than `ANSWER_S`, and that only if a process gets no core: a grammar that
takes long has used up its processor time before, and a process that a signal has stopped is noticed
within `STOPPED_S`.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ess.errors import Unavailable

ANSWER_S: Final = 10.0
STOPPED_S: Final = 1.0
START_S: Final = 60.0
SPARE_COUNT: Final = 2
_CHILD: Final = Path(__file__).with_name("grammar_child.py")
_PREFIX_BYTES: Final = 8


class Link:
    """A connection to such a process. OSError means that the process is lost."""

    def __init__(self, made: socket.socket, process: int = 0) -> None:
        self.socket = made
        self.process = process
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
        while _has_something([self.socket], 0):
            if (answer := self._take()) is not None:
                return answer
        return None

    def ask(self, message: dict[str, Any], *files: int) -> tuple[dict[str, Any], bytes]:
        self.send(message, *files)
        deadline_s = time.monotonic() + ANSWER_S
        while time.monotonic() <= deadline_s:
            if not _has_something([self.socket], STOPPED_S):
                self.require_going()
            elif (answer := self._take()) is not None:
                return answer
        raise TimeoutError(f"no answer within {ANSWER_S} s")

    def require_going(self) -> None:
        """It can answer: no signal has stopped it."""
        if _is_stopped(self.process):
            raise TimeoutError(f"process {self.process} is stopped")

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
        assert len(self._read) == start + answer["raw"], "more than the answer that was asked for"
        raw, self._read = bytes(self._read[start:]), bytearray()
        return answer, raw

    def close(self) -> None:
        self.socket.close()


def _has_something(sockets: list[socket.socket], seconds: float) -> bool:
    """Whether one of them has something to read within this time. Their files may have any number:
    `select` takes none from 1,024 on, and an engine with many peers has more open."""
    waiting = select.poll()
    for each in sockets:
        waiting.register(each, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def _is_stopped(process: int) -> bool:
    """Whether a signal has stopped it; False where Linux does not say so."""
    try:
        said = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return said.rpartition(")")[2].split()[0] == "T"


class Sandbox:
    """The first process and those that wait for a grammar. It is started when it is first needed,
    and again when it was lost: OSError says so, once. Nothing but `end` waits for an answer."""

    def __init__(self, vocabulary: Callable[[], bytes]) -> None:
        self._describing = threading.Thread(target=self._describe, args=(vocabulary,), daemon=True)
        self._vocabulary = b""
        self._fault = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._has_started = False
        self._deadline_s = 0.0
        self._failure_count = 0
        self._forked: list[Link] = []
        self._spares: list[tuple[Link, int]] = []

    def spare(self) -> tuple[Link, int] | None:
        """A process for one grammar, and its number; None as long as there is none. Unavailable if
        the first process has failed to start twice, or the vocabulary cannot be described."""
        if not self._is_started():
            return None
        try:
            first = self._refill()
            if not self._spares:
                first.require_going()
                return None
            taken = self._spares.pop(0)
            self._refill()
            return taken
        except OSError:
            self.close()
            raise

    def wait(self, sockets: list[socket.socket], seconds: float) -> None:
        """Waits until one of `sockets`, or of the grammars' processes, has something to read."""
        if self._describing.is_alive():
            self._describing.join(seconds)
            return
        ours = [link.socket for link in self._forked]
        if self._link is not None and not self._has_started:
            ours.append(self._link.socket)
        with contextlib.suppress(OSError, ValueError):
            _has_something(sockets + ours, seconds)
        with contextlib.suppress(OSError):
            self._hear()

    def _refill(self) -> Link:
        """Asks the first process, which is returned, for those that are missing."""
        assert self._link is not None, "it is started"
        while len(self._forked) + len(self._spares) < SPARE_COUNT:
            ours, theirs = socket.socketpair()
            self._forked.append(Link(ours))
            with theirs:
                self._link.send({"verb": "fork"}, theirs.fileno())
        self._hear()
        return self._link

    def _hear(self) -> None:
        for link in list(self._forked):
            if (answer := link.poll()) is not None:
                self._forked.remove(link)
                link.process = answer[0]["process"]
                self._spares.append((link, link.process))

    def _is_started(self) -> bool:
        """Starts what is missing: first the description of the vocabulary, then the process."""
        if not self._is_described():
            return False
        if self._process is not None and self._has_started and self._process.poll() is not None:
            self.close()
        if self._link is None:
            self._link = self._start()
        if not self._has_started:
            self._await_start(self._link)
        return self._has_started

    def _is_described(self) -> bool:
        if self._fault:
            raise Unavailable(f"no grammars for this vocabulary: {self._fault}")
        if not self._describing.ident:
            self._describing.start()
        return bool(self._vocabulary)

    def _await_start(self, link: Link) -> None:
        """The process answers once it has read the vocabulary. One failure is forgiven."""
        try:
            self._has_started = link.poll() is not None
            if not self._has_started and time.monotonic() > self._deadline_s:
                raise TimeoutError(f"no start within {START_S} s")
        except OSError:
            self.close()
            self._failure_count += 1
            if self._failure_count > 1:
                self._failure_count = 0
                raise Unavailable("the process that compiles grammars does not start") from None
        if self._has_started:
            self._failure_count = 0

    def _describe(self, vocabulary: Callable[[], bytes]) -> None:
        """Runs in a thread of its own: no caller would see an error that is raised here."""
        try:
            self._vocabulary = vocabulary()
        except Exception as error:
            self._fault = f"{type(error).__name__}: {error!s:.200}"

    def end(self, process: int) -> int:
        """Which signal had ended it; 0 if none had, or if it cannot be said any more."""
        if self._link is None or not self._has_started:
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
        self._has_started = False
        waiting = [*self._forked, *(spare for spare, _ in self._spares)]
        self._forked, self._spares = [], []
        for each in [link, *waiting] if link is not None else waiting:
            each.close()
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> Link:
        self._deadline_s = time.monotonic() + START_S
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
        return Link(ours, self._process.pid)
