"""Processes that a killed program leaves: its engine, which the system kills with it.

The end of a process takes half a second for each GiB in small pages, a minute for an engine's host
pool beside a device. The next engine would find that memory taken: it would refuse to start, or
plan with less for all of its life. So the command adopts what its programs leave
(PR_SET_CHILD_SUBREAPER of Linux), and waits for its end. Elsewhere, and without /proc, nothing is
adopted and nothing is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

from ess import console
from ess.clock import Clock
from ess.server.process.child import Child
from ess.units import counted

PR_SET_CHILD_SUBREAPER: Final = 36
GONE_S: Final = 300.0
LOOK_S: Final = 0.05


def adopt_orphans(*, is_wanted: bool = True) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted))


class Orphans:
    """Owns the list of this process's own children: those that it has by now, and those that are
    started here. All others are orphans. A start and a look exclude each other, so a child that has
    just been started is never taken for an orphan."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._own = _children()
        self._turn = asyncio.Lock()

    async def started(self, start: Awaitable[Child]) -> Child:
        async with self._turn:
            child = await start
            self._own.add(child.pid)
            return child

    def forget(self, child: Child) -> None:
        """The child has ended, and its number may be given to another process."""
        self._own.discard(child.pid)

    async def gone(self, name: str) -> None:
        """Waits until no orphan is left, for GONE_S at most."""
        until_s, is_said = self._clock.now_s() + GONE_S, False
        while left := await self._left():
            shown = counted(len(left), "process", "processes")
            pids = " ".join(map(str, left))
            if self._clock.now_s() >= until_s:
                console.note(
                    f"ess: {name} starts beside {shown} that killed ones left, which have not ended"
                    f" in {GONE_S:.0f} s and may hold memory: `kill -9 {pids}` ends them, unless"
                    " a driver or a disk hangs"
                )
                return
            if not is_said:
                console.note(
                    f"ess: {name} waits for the end of {shown} that killed ones left ({pids}),"
                    f" {GONE_S:.0f} s at most"
                )
                is_said = True
            await asyncio.sleep(LOOK_S)

    async def _left(self) -> list[int]:
        """Those that have ended may have left others since the last look."""
        left: list[int] = []
        async with self._turn:
            while not left and (orphans := _children() - self._own):
                left = sorted(pid for pid in orphans if not _has_ended(pid))
        return left


def _children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(map(int, task.read_text().split()))
    return pids


def _has_ended(pid: int) -> bool:
    """Whether an adopted process has ended; the system then forgets it."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
