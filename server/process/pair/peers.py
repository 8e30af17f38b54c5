"""A decode worker stays connected to its configured prefill workers, and to no others.

    every 2 s, for each:  POST http://ADDRESS/peers  our sealed metadata  ->  theirs, of all stages
    to the engine:        Meet(address, theirs)                           ->  Met(epoch)

So a prefill worker may start later, or restart: its next boot has another epoch, and is met within
two seconds. Our own next engine knows none of them: from the loss of an engine on no peer is up,
until the next one, as soon as it is ready, has met it. An address in a request is only looked up
here; it is never dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ess.clock import Clock
from ess.errors import BadInput, Unavailable, reason_of
from ess.server.process.link import EngineLink
from ess.server.process.pair.addresses import Address, NamedWorker, read_address
from ess.transfer.members import METADATA_BYTES_MAX
from ess.transfer.messages import Seal

Role = Literal["both", "prefill", "decode"]
MEET_EVERY_S: Final = 2.0
MEET_S: Final = 5.0
MISSES_MAX: Final = 3
HEAD_BYTES_MAX: Final = 16 << 10
NOT_YET: Final = "it has not been met yet"
REPLACED: Final = "the engine here was lost, and the next one has not met it yet"


@dataclass(slots=True)
class Peer:
    """`epoch` is that of its last boot that was met; `why` says why it is not up."""

    named: NamedWorker
    since_s: float
    epoch: int = 0
    is_up: bool = False
    why: str = NOT_YET
    misses: int = 0

    def met(self, epoch: int, now_s: float) -> None:
        if not self.is_up or epoch != self.epoch:
            self.since_s = now_s
        self.epoch, self.is_up, self.why, self.misses = epoch, True, "", 0

    def missed(self, why: str, now_s: float) -> None:
        if self.is_up:
            self.since_s = now_s
        self.is_up, self.why = False, why


class Peers:
    """The table: address -> epoch, up or not, since when."""

    def __init__(self, named: Sequence[NamedWorker], link: EngineLink, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        now_s = clock.now_s()
        self._table = {peer.name: Peer(peer, now_s) for peer in named}

    def find(self, address: Address) -> Peer | None:
        return self._table.get(address)

    @property
    def missing(self) -> list[str]:
        return [str(name) for name, peer in self._table.items() if not peer.is_up]

    def lines(self) -> list[dict[str, Any]]:
        now_s = self._clock.now_s()
        return [
            {
                "address": str(name),
                "dialled": str(peer.named.at),
                "engine_id": engine_id(peer.epoch) if peer.epoch else None,
                "is_up": peer.is_up,
                "since_s": round(now_s - peer.since_s, 1),
                "why": peer.why,
            }
            for name, peer in self._table.items()
        ]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for peer in self._table.values():
                group.create_task(self._keep(peer))

    async def _keep(self, peer: Peer) -> None:
        """Each engine of ours meets the peer, and a meeting of a lost engine is given up: it would
        tell the next engine of a peer that does not know it."""
        engine = self._link.engine
        while (ready := await engine.until_ready()) is not None:
            meeting = asyncio.ensure_future(self._meet_again(peer, ready.metadata))
            try:
                await engine.until_lost(ready)
            finally:
                meeting.cancel()
                await asyncio.gather(meeting, return_exceptions=True)
            peer.missed(REPLACED, self._clock.now_s())

    async def _meet_again(self, peer: Peer, metadata: bytes) -> None:
        while True:
            await self._meet(peer, metadata)
            await asyncio.sleep(MEET_EVERY_S)

    async def _meet(self, peer: Peer, metadata: bytes) -> None:
        """Meets a peer; it is down after MISSES_MAX late answers, or once it refuses or is gone.
        Whatever goes wrong, it is tried again: there is no other way to connect this worker."""
        try:
            async with asyncio.timeout(MEET_S):
                theirs = await post(peer.named.at, "/peers", metadata)
            met = await self._link.meet(str(peer.named.name), theirs)
            if met.sentence:
                raise Unavailable(met.sentence)
        except TimeoutError:
            peer.misses += 1
            if peer.misses >= MISSES_MAX or not peer.is_up:
                peer.missed(f"it has not answered within {MEET_S:g} s", self._clock.now_s())
        except Exception as error:
            peer.missed(reason_of(error), self._clock.now_s())
        else:
            peer.met(met.epoch, self._clock.now_s())


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The worker's role. Others connect at `host` and `port`, which differs from the main port if
    `has_own_port`. A decode worker has `peers`; prefill and decode workers have the `seal`."""

    role: Role = "both"
    host: str = "127.0.0.1"
    port: int = 0
    has_own_port: bool = False
    peers: Peers | None = None
    seal: Seal | None = None
    allows_fake: bool = False

    def called(self, authority: str) -> Address:
        """The name in a request's Host header, with the port at which workers connect."""
        try:
            asked = read_address(authority, where="host")
        except BadInput:
            return Address(self.host, self.port)
        return Address(asked.host, self.port) if self.has_own_port else asked


WHOLE: Final = Split()


def engine_id(epoch: int) -> str:
    """A boot epoch as text: some JSON readers keep only 53 bits of a number."""
    return f"{epoch:016x}"


async def post(address: Address, path: str, body: bytes) -> bytes:
    """The content of a good answer; Unavailable or OSError if there is none."""
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=HEAD_BYTES_MAX)
    try:
        head = (
            f"POST {path} HTTP/1.1",
            f"host: {address}",
            "content-type: application/octet-stream",
            f"content-length: {len(body)}",
            "connection: close",
        )
        writer.write("\r\n".join((*head, "\r\n")).encode() + body)
        await writer.drain()
        return await _answer(reader)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise Unavailable("it does not answer in HTTP") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The content; refuses an answer that states no length, or one that is too great."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    status = first.split(b" ")[1:2]
    fields = dict(line.lower().split(b":", 1) for line in lines if b":" in line)
    length = fields.get(b"content-length", b"").strip()
    if not first.startswith(b"HTTP/1.") or not length.isdigit() or len(length) > 9:
        raise Unavailable("it does not answer in HTTP with a length")
    if int(length) > METADATA_BYTES_MAX:
        raise Unavailable(f"its answer has {int(length):,} bytes, at most {METADATA_BYTES_MAX:,}")
    content = await reader.readexactly(int(length))
    if status != [b"200"]:
        reason = content[:300].decode(errors="replace")
        raise Unavailable(f"it answers {b''.join(status).decode(errors='replace'):.9}: {reason}")
    return content
