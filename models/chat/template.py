"""A checkpoint's Jinja template (GLM has one), run in a process that may not hurt.

The child (`template_child`) is started at the first rendering and stays; one that runs past the
deadline is killed, the caller gets BadInput, and the next rendering starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from ess.errors import BadInput

SOURCE_BYTES_MAX: Final = 1 << 20
_ANSWER_BYTES_MAX: Final = 256 << 20
_CHILD: Final = Path(__file__).with_name("template_child.py")


class ChatTemplate:
    """Renders one template; calls from several threads take turns."""

    def __init__(self, source: str, *, timeout_s: float = 5.0) -> None:
        if len(source.encode("utf-8", "replace")) > SOURCE_BYTES_MAX:
            raise BadInput(f"the chat template is larger than {SOURCE_BYTES_MAX:,} bytes")
        self._source = source
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    def render(self, names: Mapping[str, Any]) -> str:
        """The prompt, or BadInput with the template's own complaint."""
        with self._turn:
            if self._child is None:
                self._start()
            return self._ask({"names": dict(names)})

    def close(self) -> None:
        with self._turn:
            self._stop()

    def _start(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._ask({"source": self._source})

    def _ask(self, request: dict[str, Any]) -> str:
        """One question, one answer, before the deadline; a child that fails is not asked again."""
        assert self._child is not None, "a child is started before it is asked"
        deadline = time.monotonic() + self._timeout_s
        try:
            answer = _exchange(self._child, json.dumps(request).encode(), deadline=deadline)
        except TimeoutError:  # before OSError, of which it is one
            self._stop()
            raise BadInput(f"the chat template ran longer than {self._timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            self._stop()
            raise BadInput(f"the chat template's process ended: {str(error)[:200]}") from None
        if "error" in answer:
            if "source" in request:
                self._stop()
            raise BadInput(f"the chat template: {answer['error']}")
        return str(answer["text"])

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


def _exchange(child: subprocess.Popen[bytes], raw: bytes, *, deadline: float) -> dict[str, Any]:
    """The child reads the whole question before it writes, so the two cannot block each other."""
    assert child.stdin is not None, "stdin is a pipe"
    assert child.stdout is not None, "stdout is a pipe"
    child.stdin.write(len(raw).to_bytes(8, "little") + raw)
    child.stdin.flush()
    count = int.from_bytes(_read(child.stdout, 8, deadline), "little")
    if count > _ANSWER_BYTES_MAX:
        raise BadInput(f"an answer of {count:,} bytes is too long")
    found = json.loads(_read(child.stdout, count, deadline))
    if not isinstance(found, dict):
        raise BadInput("the answer is no object")
    return found


def _read(stream: IO[bytes], count: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
            raise TimeoutError
        piece = os.read(stream.fileno(), count - len(found))
        if not piece:
            raise BadInput("the child gave no answer")
        found += piece
    return bytes(found)
