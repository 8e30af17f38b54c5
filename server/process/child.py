"""A child process as its parent sees it: the engine, or another process of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ess.engine.process.lifeline import words_of

LINE_BYTES_MAX: Final = 64 << 10
"""A record of a log, such as a traceback, must come whole."""
ASKING: Final = (signal.SIGTERM, signal.SIGINT)
QUIET_CODES: Final = frozenset({0, *(-number for number in ASKING), *(128 + n for n in ASKING)})


@dataclass(frozen=True, slots=True)
class End:
    """How a process has ended; `is_by_code` unless a signal ended it. `is_quiet` if it ended as a
    process does that was asked to end."""

    how: str
    is_by_code: bool
    is_quiet: bool = False


class Child:
    """Started in its own session, so that Ctrl-C reaches only the server, which drains. Its stdin
    stays open as long as this process lives: when stdin closes, it ends too."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls,
        program: str,
        told: msgspec.Struct,
        *arguments: str,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        is_heard: bool = False,
    ) -> Child:
        """Starts a process; with `is_heard`, its output is read from `printed` and `logged`."""
        piped = asyncio.subprocess.PIPE if is_heard else None
        process = await asyncio.create_subprocess_exec(
            *words_of(program, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=piped,
            stderr=piped,
            env=environment,
            start_new_session=True,
            pass_fds=descriptors,
        )
        child = cls(process)
        child.tell(msgspec.json.encode(told).decode())
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        """Writes a line to its stdin; does nothing if the process has ended."""
        assert "\n" not in line, f"{line!r} is more than a line"
        assert self._process.stdin is not None, "stdin is a pipe"
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    def printed(self) -> AsyncIterator[str]:
        return lines_of(self._process.stdout)

    def logged(self) -> AsyncIterator[str]:
        return lines_of(self._process.stderr)

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP or SIGTSTP has stopped it and it was not continued."""
        try:
            wanted = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, wanted) is not None
        except ChildProcessError:
            return False

    @property
    def has_ended(self) -> bool:
        """Its output may still be open, in a process that it has started."""
        return self._process.returncode is not None

    async def ended(self) -> End:
        """Waits until the process has ended."""
        code = await self._process.wait()
        is_quiet = code in QUIET_CODES
        if code < 0:
            how = f"its process was ended by {signal.Signals(-code).name}"
            return End(how, is_by_code=False, is_quiet=is_quiet)
        return End(f"its process ended with code {code}", is_by_code=True, is_quiet=is_quiet)

    async def stop(self, *, within_s: float) -> None:
        """Waits for the end that it has been told to come to; kills it after `within_s`."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), within_s)
        self.kill()
        await self._process.wait()

    def ask_to_end(self, by: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(by)

    def hang_up(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def lines_of(stream: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """The stream's lines until its end; a line longer than LINE_BYTES_MAX comes in pieces."""
    assert stream is not None, "its output is not heard"
    rest = b""
    while piece := await stream.read(LINE_BYTES_MAX):
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            whole, rest = [*whole, rest], b""
        for line in whole:
            yield line.decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")
