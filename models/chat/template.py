"""A checkpoint's Jinja template (GLM has one), run in a process that may not hurt.

The child (`template_child`) is started at the first rendering and stays. A template that takes too
much processor time ends it, the caller gets BadInput, and the next rendering starts another. A
child that was killed or stopped from outside does not blame the input: another child is asked once,
and then the caller gets Unavailable.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from ess.errors import BadInput, Unavailable

SOURCE_BYTES_MAX: Final = 1 << 20
HELD_FACTOR: Final = 4.0
START_S: Final = 30.0
_ANSWER_BYTES_MAX: Final = 256 << 20
_FAULTS: Final = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})
_CHILD: Final = Path(__file__).with_name("template_child.py")


class _Lost(Exception):
    """The child was ended or held by something that is not the template."""


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
            with contextlib.suppress(_Lost):
                return self._render(names)
            try:
                return self._render(names)
            except _Lost:
                sentence = "the process that renders the chat template was lost twice; try again"
                raise Unavailable(sentence) from None

    def _render(self, names: Mapping[str, Any]) -> str:
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
        self._ask({"source": self._source, "seconds": self._timeout_s})

    def _ask(self, request: dict[str, Any]) -> str:
        """One question, one answer; a child that fails is not asked again. Its processor time ends
        it first, also on a busy machine, unless something holds it."""
        assert self._child is not None, "a child is started before it is asked"
        held_s = START_S if "source" in request else HELD_FACTOR * self._timeout_s
        deadline = time.monotonic() + held_s
        try:
            answer = _exchange(self._child, json.dumps(request).encode(), deadline=deadline)
        except TimeoutError:  # before OSError, of which it is one
            self._stop()
            raise _Lost from None
        except (OSError, EOFError):
            raise self._why_ended() from None
        except ValueError as error:
            self._stop()
            raise BadInput(f"the chat template's process said {str(error)[:200]}") from None
        if "error" in answer:
            if "source" in request:
                self._stop()
            raise BadInput(f"the chat template: {answer['error']}")
        return str(answer["text"])

    def _why_ended(self) -> Exception:
        child = self._child
        self._stop()
        assert child is not None, "it was asked"
        if child.returncode == -signal.SIGPROF:
            return BadInput(f"the chat template ran longer than {self._timeout_s:g} s")
        if child.returncode >= 0 or -child.returncode in _FAULTS:
            return BadInput(f"the chat template ended its process (code {child.returncode})")
        return _Lost()

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
    _write(child.stdin, len(raw).to_bytes(8, "little") + raw, deadline)
    count = int.from_bytes(_read(child.stdout, 8, deadline), "little")
    if count > _ANSWER_BYTES_MAX:
        raise BadInput(f"{count:,} bytes, too many")
    answer = json.loads(_read(child.stdout, count, deadline))
    if not isinstance(answer, dict):
        raise BadInput("what is no object")
    return answer


def _write(stream: IO[bytes], raw: bytes, deadline: float) -> None:
    """A pipe that is not read takes no more than its buffer, and then blocks its writer."""
    os.set_blocking(stream.fileno(), False)
    left = memoryview(raw)
    while left:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([], [stream], [], left_s)[1]:
            raise TimeoutError("the child was held")
        left = left[os.write(stream.fileno(), left) :]


def _read(stream: IO[bytes], count: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
            raise TimeoutError("the child was held")
        piece = os.read(stream.fileno(), count - len(received))
        if not piece:
            raise EOFError("the child has ended")
        received += piece
    return bytes(received)
