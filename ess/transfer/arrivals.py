"""What has come of each handoff, by the receiver's own count. No torch.

A handoff, or one sender's part of it, exists here because the receiver reserved room for it, never
because a message named it; so a million unknown uids cost a million refusals and no memory. What
must come is fixed at that moment as shares: for each kind of piece its layers, its pages, and the
bytes of a unit. A unit is one page of one layer, or a part of what a request keeps beside its rows.

A piece is taken when it belongs to this handoff, comes from the promised peer and boot, lies inside
a share, has the size of its range, and when the bytes in our memory give its checksum. Bytes land
before they are checked, so a piece that fails the check takes back every unit of its range: a
corrupt second copy must not hide behind a good first one. The handoff is complete when all units
are taken, and only then; a sender cannot declare it complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ess.clock import Clock
from ess.errors import BadInput
from ess.transfer.messages import Again, Count, Piece, PieceKind, Reason, checksum

HANDOFFS_MAX: Final = 4096

Units = NDArray[np.bool_]
"""[layers, pages] of a share: whether each unit has come."""

ReadPiece = Callable[[Piece], Iterable[memoryview]]
"""The bytes of a piece as they landed, layer by layer and page by page."""


class Verdict(Enum):
    TAKEN = "taken"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    OUTSIDE = "outside"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What must come of one kind: in each of the layers `page_count` units from `page_begin` on.

    Every unit has `unit_bytes`, or in each layer its entry of `layer_bytes`; the last page's unit
    has `last_bytes`, if that is given. Windows may have any size up to `unit_bytes`: the room they
    need depends on their positions.
    """

    kind: PieceKind
    layer_begin: int
    layer_end: int
    page_begin: int = 0
    page_count: int
    unit_bytes: int
    layer_bytes: tuple[int, ...] = ()
    last_bytes: int = 0

    @property
    def page_end(self) -> int:
        return self.page_begin + self.page_count

    def holds(self, piece: Piece) -> bool:
        layers = self.layer_begin <= piece.layer_begin and piece.layer_end <= self.layer_end
        pages = self.page_begin <= piece.page_begin and piece.page_end <= self.page_end
        page_count = piece.page_end - piece.page_begin
        size = page_count * self._bytes_of(range(piece.layer_begin, piece.layer_end))
        if self.last_bytes and piece.page_end == self.page_end:
            size += self.last_bytes - self.unit_bytes
        is_windows = self.kind is PieceKind.WINDOWS
        right_size = piece.byte_count <= size if is_windows else piece.byte_count == size
        return layers and pages and right_size

    def _bytes_of(self, layers: range) -> int:
        """Bytes of a page in all of these layers."""
        if not self.layer_bytes:
            return len(layers) * self.unit_bytes
        first = self.layer_begin
        return sum(self.layer_bytes[layers.start - first : layers.stop - first])


class Arrival:
    """The units of one handoff that have come, and those that are missing.

    `window_bytes` is the size of the windows that came last. It may be silent for `within_s`.
    """

    def __init__(
        self, *, uid: int, sender: int, shares: Sequence[Share], within_s: float = math.inf
    ) -> None:
        if len({share.kind for share in shares}) != len(shares):
            raise BadInput(f"request {uid}: a kind of piece has two shares")
        self.uid = uid
        self.sender = sender
        self.within_s = within_s
        self.deadline_s = math.inf
        self._shares = {share.kind: share for share in shares}
        self._taken = {
            share.kind: np.zeros((share.layer_end - share.layer_begin, share.page_count), np.bool_)
            for share in shares
        }
        self._wanted = sum(taken.size for taken in self._taken.values())
        self._arrived = 0
        self.window_bytes = 0

    @property
    def count(self) -> Count:
        return Count(self.uid, self._arrived, self._wanted)

    @property
    def is_complete(self) -> bool:
        return self._arrived == self._wanted

    def take(self, piece: Piece, *, read: ReadPiece) -> Verdict:
        assert piece.uid == self.uid
        share = self._shares.get(piece.kind)
        if share is None or not share.holds(piece):
            return Verdict.OUTSIDE
        units = self._units(share, piece)
        before = int(units.sum())
        units[:] = checksum(read(piece)) == piece.checksum
        self._arrived += int(units.sum()) - before
        if piece.kind is PieceKind.WINDOWS:
            self.window_bytes = piece.byte_count
        if not units.all():
            return Verdict.CORRUPT
        return Verdict.TAKEN if before < units.size else Verdict.DUPLICATE

    def missing(self) -> Iterator[Again]:
        """Requests for what is missing: runs of pages; neighbouring layers that lack the same pages
        share one."""
        for kind, share in self._shares.items():
            taken, first = self._taken[kind], share.layer_begin
            for begin, end in _alike(taken):
                for page, page_end in _gaps(taken[begin]):
                    layers = (first + begin, first + end)
                    pages = (share.page_begin + page, share.page_begin + page_end)
                    yield Again(self.uid, kind, *layers, *pages)

    def check(self) -> None:
        arrived = sum(int(taken.sum()) for taken in self._taken.values())
        assert arrived == self._arrived, f"request {self.uid}: {arrived} units, {self._arrived}"

    def _units(self, share: Share, piece: Piece) -> Units:
        layer, page = share.layer_begin, share.page_begin
        layers = slice(piece.layer_begin - layer, piece.layer_end - layer)
        pages = slice(piece.page_begin - page, piece.page_end - page)
        return self._taken[share.kind][layers, pages]


class Arrivals:
    """Everything on its way to this worker, by uid and sender: several peers may bring parts of one
    handoff. Each part is kept until it has been silent for its `within_s`."""

    def __init__(self, *, clock: Clock, handoffs_max: int = HANDOFFS_MAX) -> None:
        self._clock = clock
        self._handoffs_max = handoffs_max
        self._open: dict[tuple[int, int], Arrival] = {}

    def __len__(self) -> int:
        return len(self._open)

    def expect(
        self, *, uid: int, sender: int, shares: Sequence[Share], within_s: float
    ) -> Reason | None:
        """Begins to count what this sender brings, with room reserved for it; or returns the reason
        why it cannot."""
        if (uid, sender) in self._open:
            return Reason.DUPLICATE
        if len(self._open) >= self._handoffs_max:
            return Reason.FULL
        self._open[uid, sender] = Arrival(uid=uid, sender=sender, shares=shares, within_s=within_s)
        self.heard(uid, sender=sender)
        return None

    def take(self, piece: Piece, *, sender: int, read: ReadPiece) -> Verdict:
        arrival = self.find(piece.uid, sender=sender)
        if arrival is None:
            return Verdict.UNKNOWN
        verdict = arrival.take(piece, read=read)
        if verdict is Verdict.TAKEN:
            self.heard(piece.uid, sender=sender)
        return verdict

    def heard(self, uid: int, *, sender: int) -> None:
        """Extends the deadline, if `sender` brings this handoff."""
        arrival = self.find(uid, sender=sender)
        if arrival is not None:
            arrival.deadline_s = self._clock.now_s() + arrival.within_s

    def find(self, uid: int, *, sender: int) -> Arrival | None:
        """The arrival of this sender alone: other peers do not even learn that it exists."""
        return self._open.get((uid, sender))

    def close(self, uid: int, *, sender: int) -> None:
        """Ends an arrival: later pieces of it are unknown."""
        self._open.pop((uid, sender), None)

    def expired(self) -> list[Arrival]:
        """Closes and returns the arrivals whose deadline has passed."""
        now_s = self._clock.now_s()
        late = [arrival for arrival in self._open.values() if arrival.deadline_s <= now_s]
        for arrival in late:
            self.close(arrival.uid, sender=arrival.sender)
        return late

    def check(self) -> None:
        assert len(self._open) <= self._handoffs_max, f"{len(self._open)} arrivals"
        for key, arrival in self._open.items():
            assert key == (arrival.uid, arrival.sender), f"{arrival.uid} is listed as {key}"
            assert arrival.deadline_s < math.inf, f"{arrival.uid} may stay silent for ever"
            arrival.check()


def _alike(taken: Units) -> Iterator[tuple[int, int]]:
    """Runs of layers for which the same pages have come, as (begin, end)."""
    changes = np.flatnonzero((taken[1:] != taken[:-1]).any(axis=1)) + 1
    edges = [0, *changes.tolist(), len(taken)]
    yield from pairwise(edges)


def _gaps(taken: Units) -> Iterator[tuple[int, int]]:
    """Runs of pages that are not taken, as (begin, end)."""
    edges = np.diff(np.concatenate(([0], ~taken, [0])).astype(np.int8))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    yield from zip(begins.tolist(), ends.tolist(), strict=True)
