"""The server's other processes, kept by the first one.

Each serves HTTP from its own listener on the same address, with its own socket to the engine; the
kernel divides connections among them. The first process also serves. It starts the others, tells
them when to drain, when to end and where another engine listens, and replaces a front that has
ended. It accepts connections for a front that is not up (`StandIn`). When the first process ends,
so do they: their stdin closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Final

import msgspec

from ess import console
from ess.errors import reason_of
from ess.server.process.child import Child
from ess.server.process.link import EngineLink
from ess.server.process.listening.stand_in import StandIn
from ess.server.process.tally import Shelf

AGAIN_S: Final = 0.5
AGAIN_MAX_S: Final = 10.0
CALM_S: Final = 60.0
"""After a front has lived this long, the pause is short again."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What every such process gets at its start. `told` is for its program; `listener` and `up` are
    inherited descriptors: it writes a byte to `up` when it accepts connections."""

    told: msgspec.Raw
    folder: str
    listener: int
    front: int
    count: int
    life: int = 0
    up: int = -1


def endpoint_of(folder: str, front: int, engine: int = 0) -> str:
    """The endpoint at which a front connects to engine number `engine` of the server, counted from
    0."""
    return f"ipc://{folder}/engine-{front}-{engine}"


class Fronts:
    def __init__(
        self, program: str, starts: Sequence[Start], link: EngineLink, stand_in: StandIn
    ) -> None:
        assert [start.front for start in starts] == [*range(1, len(starts) + 1)], "0 is the first"
        self._program = program
        self._starts = starts
        self._link = link
        self._stand_in = stand_in
        self._children: dict[int, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._last_words: list[str] = []
        self._succession: list[str] = []
        link.on_cut = self._end_stuck

    def start(self) -> None:
        self._keepers = [asyncio.ensure_future(self._keep(start)) for start in self._starts]

    def drain(self) -> None:
        self._tell("drain")

    def refresh(self) -> None:
        """Has all fronts look at files that may have changed."""
        self._say("refresh")

    def _end_stuck(self, front: int) -> None:
        """Kills a front that reads nothing; once it has ended, another takes its place."""
        if front in self._children:
            console.note(f"ess: server process {front} takes nothing from the engine; it is ended")
            self._children[front].kill()

    def succeed(self, engine: int, sentence: str) -> None:
        """An engine is lost, as the sentence says; fronts connect to this one next."""
        self._succession = [f"succeed {engine} {' '.join(sentence.split())}"]
        self._say(*self._succession)

    def end(self, sentence: str) -> None:
        """Ends all fronts, and with them their open streams."""
        self._tell(f"end {' '.join(sentence.split())}")

    async def stop(self, *, within_s: float) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(c.stop(within_s=within_s) for c in self._children.values()))

    async def _keep(self, start: Start) -> None:
        wait_s = AGAIN_S
        await self._stand_in_at(start.listener)
        while True:
            began_s = asyncio.get_running_loop().time()
            how = await self._run_front(start)
            with contextlib.suppress(OSError):
                Shelf(start.folder, count=start.count, front=start.front, life=start.life).close()
            if all(line == "drain" for line in self._last_words):  # not at the end of all
                self._link.front_lost(start.front)
                await self._stand_in_at(start.listener)
            if self._last_words:
                return
            console.note(f"ess: server process {start.front} is gone: {how}; another starts")
            is_calm = asyncio.get_running_loop().time() - began_s > CALM_S
            wait_s = AGAIN_S if is_calm else wait_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, AGAIN_MAX_S)
            start = msgspec.structs.replace(start, life=start.life + 1)

    async def _stand_in_at(self, listener: int) -> None:
        """Unless there are too many open files: then connections wait for the next process."""
        with contextlib.suppress(OSError):
            await self._stand_in.take(listener)

    async def _run_front(self, start: Start) -> str:
        """Runs a front from start to end, and says how it ended, or why it could not be started."""
        try:
            said, up = os.pipe()
        except OSError as error:
            return _no_start(error)
        loop = asyncio.get_running_loop()
        try:
            child = await self._started(msgspec.structs.replace(start, up=up))
            loop.add_reader(said, self._hear, start.listener, said)
            return (await child.ended()).how
        except OSError as error:
            return _no_start(error)
        finally:
            loop.remove_reader(said)
            os.close(said)

    async def _started(self, start: Start) -> Child:
        try:
            child = await Child.start(self._program, start, descriptors=[start.listener, start.up])
        finally:
            os.close(start.up)
        self._children[start.front] = child
        for line in (*self._succession, *self._last_words):
            child.tell(line)
        return child

    def _hear(self, listener: int, said: int) -> None:
        """Waits for a byte, which says that the front is up, or for the end of the pipe."""
        asyncio.get_running_loop().remove_reader(said)
        if os.read(said, 1):
            self._stand_in.leave(listener)

    def _tell(self, line: str) -> None:
        self._last_words.append(line)
        self._say(line)

    def _say(self, line: str) -> None:
        for child in self._children.values():
            with contextlib.suppress(OSError):
                child.tell(line)


def _no_start(error: OSError) -> str:
    return f"it cannot be started: {reason_of(error)}"
