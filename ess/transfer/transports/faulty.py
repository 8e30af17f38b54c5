"""Wraps any transport and injects the faults of networks and peers, drawn from a seed.

Faults strike transfers as they are posted, each at most once per transfer. Time is counted in
polls, so a seed and a sequence of calls give the same faults again. `injected` counts how often
each fault struck: a test without any has shown nothing.
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
from ess.transfer.transport import Event, Failed, PeerLost, Transfer, Transport
from ess.transfer.transports.around import WrappedTransport

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


class FaultyTransport(WrappedTransport):
    """`odds` are chances per transfer. `scratch` is memory for corrupted copies; the caller has
    registered it with the inner transport."""

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
        super().__init__(inner)
        self._clock = clock
        self._odds = dict(odds)
        self._scratch = scratch
        self._random = random.Random(seed)
        self._regions = {scratch.number: scratch}
        self._dropped: dict[int, tuple[float, int]] = {}
        self._held: list[_Held] = []
        self._told: list[Event] = []
        self.injected: Counter[Fault] = Counter()

    def register(self, regions: Sequence[Region]) -> None:
        self._regions |= {region.number: region for region in regions}
        super().register(regions)

    def post(self, transfer: Transfer) -> int:
        handle, fault = self._next_handle(), self._draw_fault(transfer)
        if fault is None:
            self._pass_on(handle, transfer)
        else:
            self.injected[fault] += 1
            self._strike(fault, handle, transfer)
        return handle

    def poll(self) -> list[Event]:
        for held in self._held:
            held.polls -= 1
        due = [held for held in self._held if held.polls <= 0]
        self._held = [held for held in self._held if held.polls > 0]
        for held in due:
            self._pass_on(held.handle, held.transfer)
        events = self._polled()
        for event in events:
            if isinstance(event, PeerLost):
                self._give_up(event.peer)
        endings, self._told = self._told, []
        lost = [event for event in events if isinstance(event, PeerLost)]
        others = [event for event in events if not isinstance(event, PeerLost)]
        return [*others, *endings, *self._expired(), *lost]

    def disconnect(self, peer: int) -> None:
        self._give_up(peer)
        super().disconnect(peer)

    def _draw_fault(self, transfer: Transfer) -> Fault | None:
        draw = self._random.random()
        for fault, chance in self._odds.items():
            draw -= chance
            if draw < 0:
                return fault if _can_strike(fault, transfer) else None
        return None

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
                self.disconnect(transfer.peer)
                self._told.append(PeerLost(transfer.peer, "the network was cut"))
            case Fault.CORRUPT:
                self._pass_on(handle, self._corrupted(transfer))
            case Fault.GARBLE:
                garbled = self._flipped(transfer.notification)
                self._pass_on(handle, replace(transfer, notification=garbled))
            case Fault.PARTIAL:
                cut_to = self._random.randrange(len(transfer.local))
                cut = replace(
                    transfer, local=transfer.local[:cut_to], remote=transfer.remote[:cut_to]
                )
                self._pass_on(handle, cut)

    def _corrupted(self, transfer: Transfer) -> Transfer:
        """The transfer with one run replaced by a copy in which one bit is flipped."""
        local = transfer.local.copy()
        row = self._random.randrange(len(local))
        source = views(local[row : row + 1], self._regions)[0]
        if len(source) > self._scratch.memory.size:
            raise BadInput(f"a run of {len(source)} bytes does not fit the scratch region")
        self._scratch.memory[: len(source)] = np.frombuffer(self._flipped(source), np.uint8)
        local[row, :2] = self._scratch.number, 0
        return replace(transfer, local=local)

    def _flipped(self, content: bytes | memoryview) -> bytes:
        flipped = bytearray(content)
        flipped[self._random.randrange(len(flipped))] ^= 1 << self._random.randrange(8)
        return bytes(flipped)

    def _expired(self) -> list[Event]:
        now_s = self._clock.now_s()
        late = [handle for handle, (due_s, _) in self._dropped.items() if due_s <= now_s]
        for handle in late:
            del self._dropped[handle]
        return [Failed(handle, "not done in time: the network dropped it") for handle in late]

    def _give_up(self, peer: int) -> None:
        """Fails every transfer to this peer that was held back."""
        held = [held.handle for held in self._held if held.transfer.peer == peer]
        dropped = [handle for handle, (_, to) in self._dropped.items() if to == peer]
        self._held = [held for held in self._held if held.transfer.peer != peer]
        for handle in dropped:
            del self._dropped[handle]
        self._told += [Failed(handle, f"peer {peer:016x} is gone") for handle in held + dropped]


def _can_strike(fault: Fault, transfer: Transfer) -> bool:
    if fault in (Fault.CORRUPT, Fault.PARTIAL):
        return len(transfer.local) > 0
    return bool(transfer.notification) if fault is Fault.GARBLE else True
