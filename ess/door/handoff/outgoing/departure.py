"""One handoff that leaves: whose rows, how far they are made, and where the receiver wants them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ess.array_types import Bytes
from ess.door.handoff import geometry
from ess.door.handoff.endings import Timeline
from ess.door.handoff.outgoing.pages import Pages
from ess.door.handoff.outgoing.units import Part, Units
from ess.transfer.messages import Again, PieceKind, Reason, Reserved, text_digest
from ess.transfer.runs import Runs

REGION_BYTES_MAX: Final = 1 << 62
"""Places in a region are numbers of 63 bits, sizes added."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A Reserved as it is kept: its `pages` take four bytes each, and `room` is the rest of it."""

    peer: int
    room: Reserved
    pages: NDArray[np.uint32]
    came_s: float

    @classmethod
    def of(cls, message: Reserved, *, peer: int, now_s: float) -> Target:
        room = replace(message, pages=())
        return cls(peer, room, np.array(message.pages, np.uint32), came_s=now_s)

    def equals(self, other: Target) -> bool:
        """Another copy of the same message."""
        is_alike = (self.peer, self.room) == (other.peer, other.room)
        return is_alike and np.array_equal(self.pages, other.pages)


@dataclass(slots=True, eq=False)
class Departure:
    """`ending` is why the handoff is over; what is under way for it may still be. `fault` is why a
    transfer of it failed last."""

    uid: int
    pages: Pages
    text: bytes
    token_count: int
    offered_s: float
    units: dict[PieceKind, Units]
    page_count: int
    target: Target | None = None
    windows: bytes = b""
    state: Bytes | None = None
    made_s: float | None = None
    ending: Reason | None = None
    fault: str = ""
    underway_count: int = 0
    sent_most: int = 0
    deadline_s: float = float("inf")
    told_s: float = float("-inf")
    paused_until_s: float = float("-inf")

    @classmethod
    def of(
        cls, uid: int, pages: Pages, *, prompt: Many[int], salt: bytes, now_s: float
    ) -> Departure:
        layout, token_count = pages.layout, len(prompt) - 1
        page_count = geometry.row_pages(layout, token_count)
        departure = cls(
            uid=uid,
            pages=pages,
            text=text_digest(prompt[:token_count], salt),
            token_count=token_count,
            offered_s=now_s,
            units={
                kind: Units(kind, layers, page_count, geometry.unit_bytes(layout, kind))
                for kind, layers in (
                    (PieceKind.ROWS, layout.layer_total),
                    (PieceKind.INDEX_KEYS, layout.key_layer_count),
                )
            },
            page_count=page_count,
        )
        departure.units[PieceKind.WINDOWS] = Units(PieceKind.WINDOWS, 1, 1, 0)
        if count := geometry.state_units(layout, token_count):
            state = Units(PieceKind.STATE, 1, count, geometry.STATE_UNIT_BYTES)
            departure.units[PieceKind.STATE] = state
        departure.make(range(layout.layer_total), pages.cached_count)
        return departure

    @property
    def is_made(self) -> bool:
        return self.made_s is not None

    @property
    def peer(self) -> int:
        """The peer of a handoff that has its target."""
        assert self.target is not None, f"handoff {self.uid} has no target"
        return self.target.peer

    @property
    def ticket(self) -> int:
        assert self.target is not None, f"handoff {self.uid} has no target"
        return self.target.room.ticket

    @property
    def sent_count(self) -> int:
        return sum(units.sent_count for units in self.units.values())

    @property
    def posted_count(self) -> int:
        return sum(units.posted_count for units in self.units.values())

    @property
    def wanted_count(self) -> int:
        return sum(units.wanted_count for units in self.units.values())

    def fault_of(self, target: Target) -> Reason | None:
        """Why our rows may not go there."""
        room, pages = target.room, target.pages
        if room.token_count != self.token_count or room.text != self.text:
            return Reason.WRONG_TEXT
        is_whole = room.first_page + len(pages) == self.page_count
        if not is_whole or (len(pages) and int(pages.max()) >= room.pool_pages):
            return Reason.WRONG_LAYOUT
        if room.window_at > REGION_BYTES_MAX:
            return Reason.WRONG_LAYOUT
        return None

    def aim(self, target: Target) -> None:
        assert self.target is None, f"handoff {self.uid} has its target"
        self.target = target
        for kind in (PieceKind.ROWS, PieceKind.INDEX_KEYS):
            self.units[kind].want(target.room.first_page)

    def make(self, layers: range, stop: int) -> None:
        """Rows and keys of the tokens before `stop` are made in these layers; the last page leaves
        when full."""
        assert 0 <= stop <= self.token_count, f"{stop} of {self.token_count} tokens"
        self._make_pages(layers, stop // self.pages.layout.page_tokens)

    def make_all(self, windows: bytes, state: Bytes | None, *, now_s: float) -> None:
        layout = self.pages.layout
        self.made_s, self.windows, self.state = now_s, windows, state
        self._make_pages(range(layout.layer_total), self.page_count)
        self.units[PieceKind.WINDOWS].make(range(1), 1)
        if PieceKind.STATE in self.units:
            count = geometry.state_units(layout, self.token_count)
            self.units[PieceKind.STATE].make(range(1), count)

    def _make_pages(self, layers: range, page_count: int) -> None:
        layout = self.pages.layout
        self.units[PieceKind.ROWS].make(layers, page_count)
        for layer in layers:
            group, member = layout.place_of(layer)
            number = layout.key_layer_of(group)
            if number is not None and not member:
                self.units[PieceKind.INDEX_KEYS].make(range(number, number + 1), page_count)

    def next_part(self) -> Part | None:
        """What may leave now; behind all pages the windows, then the state."""
        parts = (units.next_part() for units in self.units.values())
        return next((part for part in parts if part is not None), None)

    def remote(self, part: Part) -> Runs:
        """Where the receiver wants these pages."""
        target = self.target
        assert target is not None, f"handoff {self.uid} has no target"
        if not part.kind.is_of_layers:
            size = len(self.packed(part))
            return geometry.slot_runs(self.pages.layout, part.kind, part.pages, size, target.room)
        first = target.room.first_page
        pages = target.pages[part.pages.start - first : part.pages.stop - first].astype(np.int64)
        return geometry.unit_runs(
            self.pages.layout,
            part.kind,
            part.layers,
            pages,
            target.room.pool_pages,
            is_whole=True,
        )

    def packed(self, part: Part) -> memoryview:
        """The bytes of units that belong to no layer: windows, parts of a state."""
        if part.kind is PieceKind.WINDOWS:
            return memoryview(self.windows)
        assert self.state is not None, f"handoff {self.uid} has no state"
        span = geometry.state_span(self.pages.layout, self.token_count, part.pages)
        return self.state[span].data

    def wire_layers(self, part: Part) -> range:
        """The numbers that its layers have for the receiver, if it is of layers."""
        if not part.kind.is_of_layers:
            return part.layers
        return geometry.wire_layers(self.pages.layout, part.kind, part.layers)

    def asked(self, again: Again) -> Part:
        """The layers and units that the receiver asks for again and this worker has."""
        layers = range(again.layer_begin, again.layer_end)
        if again.kind.is_of_layers:
            layers = geometry.part_layers(self.pages.layout, again.kind, layers)
        return Part(again.kind, layers, range(again.page_begin, again.page_end))

    def timeline(self, now_s: float) -> Timeline:
        """The moments since the offer; moments that never came are left out."""
        moments = {
            "offered": self.offered_s,
            "reserved": None if self.target is None else self.target.came_s,
            "made": self.made_s,
            "ended": now_s,
        }
        since = {name: at_s - self.offered_s for name, at_s in moments.items() if at_s is not None}
        return Timeline(self.offered_s, tuple(since.items()))

    def check(self) -> None:
        for units in self.units.values():
            units.check()
            assert self.target is not None or not units.posted_count, f"{self.uid} left to nowhere"
        assert self.underway_count >= 0, f"handoff {self.uid}: {self.underway_count} under way"
        if self.is_made:
            assert self.pages.is_kept, f"handoff {self.uid}: its pages are not kept"
