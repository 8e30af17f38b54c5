"""Any transport, made worse on purpose: what networks and peers do, drawn from a seed.

Faults strike transfers as they are posted, and each strikes at most once per transfer. Time is
counted in polls, so a seed and a sequence of calls give the same faults again. `injected` tells how
often each fault struck: a test that ran without any has shown nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from ess.clock import Clock
from ess.errors import BadInput
from ess.transfer.runs import Region, views
from ess.transfer.transport import (
    Completed,
    Event,
    Failed,
    PeerLost,
    Transfer,
    TransferStats,
    Transport,
)

HELD_POLLS_MAX: Final = 8


class Fault(Enum):
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    GARBLE = "garble"
    DELAY = "delay"
    PARTIAL = "partial"
    CUT = "cut"


@dataclass(slots=True)
class _Held:
    polls: int
    handle: int
    transfer: Transfer


class FaultyTransport:
    """`odds` are chances per transfer. `scratch` is memory of the inner transport, registered by
    the caller, in which corrupted copies are made."""

    def __init__(
        self,
        inner: Transport,
        *,
        clock: Clock,
        odds: Mapping[Fault, float],
        scratch: Region,
        seed: int,
    ) -> None:
        if sum(odds.values()) > 1:
            raise BadInput(f"the odds of faults add up to {sum(odds.values())}, more than 1")
        self._inner = inner
        self._clock = clock
        self._odds = dict(odds)
        self._scratch = scratch
        self._random = random.Random(seed)
        self._regions = {scratch.number: scratch}
        self._handle_of: dict[int, int] = {}
        self._dropped: dict[int, tuple[float, int]] = {}
        self._held: list[_Held] = []
        self._cut: list[PeerLost] = []
        self._posted = 0
        self.injected: Counter[Fault] = Counter()

    @property
    def guards(self) -> bool:
        return self._inner.guards

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    def register(self, regions: Sequence[Region]) -> None:
        self._regions |= {region.number: region for region in regions}
        self._inner.register(regions)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def connect(self, metadata: bytes) -> int:
        return self._inner.connect(metadata)

    def allow(self, ticket: int) -> None:
        self._inner.allow(ticket)

    def forbid(self, ticket: int) -> None:
        self._inner.forbid(ticket)

    def is_landing(self, ticket: int) -> bool:
        return self._inner.is_landing(ticket)

    def post(self, transfer: Transfer) -> int:
        self._posted += 1
        fault = self._drawn(transfer)
        if fault is None:
            self._pass_on(self._posted, transfer)
        else:
            self.injected[fault] += 1
            self._strike(fault, self._posted, transfer)
        return self._posted

    def poll(self) -> list[Event]:
        for held in self._held:
            held.polls -= 1
        due = [held for held in self._held if held.polls <= 0]
        self._held = [held for held in self._held if held.polls > 0]
        for held in due:
            self._pass_on(held.handle, held.transfer)
        events = [self._renamed(event) for event in self._inner.poll()]
        cut, self._cut = self._cut, []
        return [*(event for event in events if event is not None), *cut, *self._late()]

    def disconnect(self, peer: int) -> None:
        self._forget(peer)
        self._inner.disconnect(peer)

    def stats(self) -> TransferStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()

    def _drawn(self, transfer: Transfer) -> Fault | None:
        draw = self._random.random()
        for fault, chance in self._odds.items():
            draw -= chance
            if draw < 0:
                return fault if _can_strike(fault, transfer) else None
        return None

    def _pass_on(self, handle: int, transfer: Transfer) -> None:
        self._handle_of[self._inner.post(transfer)] = handle

    def _strike(self, fault: Fault, handle: int, transfer: Transfer) -> None:
        match fault:
            case Fault.DROP:
                self._dropped[handle] = self._clock.now_s() + transfer.within_s, transfer.peer
            case Fault.DUPLICATE:
                self._pass_on(handle, transfer)
                self._inner.post(transfer)
            case Fault.REORDER:
                self._held.append(_Held(1, handle, transfer))
            case Fault.DELAY:
                polls = self._random.randint(2, HELD_POLLS_MAX)
                self._held.append(_Held(polls, handle, transfer))
            case Fault.CUT:
                self._pass_on(handle, transfer)
                self._inner.disconnect(transfer.peer)
                self._cut.append(PeerLost(transfer.peer, "the network was cut"))
            case Fault.CORRUPT:
                self._pass_on(handle, self._corrupted(transfer))
            case Fault.GARBLE:
                garbled = self._flipped(transfer.notification)
                self._pass_on(handle, replace(transfer, notification=garbled))
            case Fault.PARTIAL:
                some = self._random.randrange(len(transfer.here))
                cut = replace(transfer, here=transfer.here[:some], there=transfer.there[:some])
                self._pass_on(handle, cut)

    def _corrupted(self, transfer: Transfer) -> Transfer:
        """One run comes from a copy in which one bit is another."""
        here = transfer.here.copy()
        row = self._random.randrange(len(here))
        source = views(here[row : row + 1], self._regions)[0]
        if len(source) > self._scratch.memory.size:
            raise BadInput(f"a run of {len(source)} bytes does not fit the scratch region")
        self._scratch.memory[: len(source)] = np.frombuffer(self._flipped(source), np.uint8)
        here[row, :2] = self._scratch.number, 0
        return replace(transfer, here=here)

    def _flipped(self, content: bytes | memoryview) -> bytes:
        flipped = bytearray(content)
        flipped[self._random.randrange(len(flipped))] ^= 1 << self._random.randrange(8)
        return bytes(flipped)

    def _renamed(self, event: Event) -> Event | None:
        """Events of copies that we made ourselves are nobody's."""
        match event:
            case Completed(inner):
                handle = self._handle_of.pop(inner, None)
                return None if handle is None else Completed(handle)
            case Failed(inner, reason):
                handle = self._handle_of.pop(inner, None)
                return None if handle is None else Failed(handle, reason)
            case PeerLost(peer):
                self._held = [held for held in self._held if held.transfer.peer != peer]
        return event

    def _late(self) -> list[Event]:
        now_s = self._clock.now_s()
        late = [handle for handle, (due_s, _) in self._dropped.items() if due_s <= now_s]
        for handle in late:
            del self._dropped[handle]
        return [Failed(handle, "not done in time: the network dropped it") for handle in late]

    def _forget(self, peer: int) -> None:
        self._held = [held for held in self._held if held.transfer.peer != peer]
        kept = {handle: entry for handle, entry in self._dropped.items() if entry[1] != peer}
        self._dropped = kept


def _can_strike(fault: Fault, transfer: Transfer) -> bool:
    if fault in (Fault.CORRUPT, Fault.PARTIAL):
        return transfer.op == "write" and len(transfer.here) > 0
    return bool(transfer.notification) if fault is Fault.GARBLE else True
