"""The engine process, as its parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import msgspec

from ess.engine.process.messages import Launch


class EngineChild:
    """Started in a session of its own, so that Ctrl-C reaches the server alone, which drains."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, program: str, launch: Launch, endpoint: str) -> EngineChild:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            program,
            endpoint,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None, "stdin is a pipe"
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        await process.stdin.drain()
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        """Waits until the process has ended and says how."""
        code = await self._process.wait()
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"

    async def stop(self, *, within_s: float) -> None:
        """Wait for its end, which it has been told to come to; kill it if it takes longer."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), within_s)
        self.kill()
        await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
