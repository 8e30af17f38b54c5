"""Copies rows into slots before they are selected: a prompt's windows, then what else fits.

A landing is cut into pieces of a few thousand rows. A piece claims its slots on compute, in the
order of the steps, and is copied on a stream of its own; a few pieces are under way at a time, and
each has its own place for what it has claimed. Rows on their way are read in place, so a step need
not wait for them. There is one exception: a slot that a piece is filling cannot give way, so a step
whose new rows might find no slot waits for the piece. The host starts further pieces between steps,
when it looks at landings anyway: an open step has looked at which slots are free for its new rows.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ess.array_types import PageIds, RowIds
from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.uploads import upload, upload_into
from ess.door.sequences.sequence import Sequence
from ess.flashtrans.mover import PreparedCopies
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.device_bytes import LANDING_ROWS, LANDINGS
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_shape import ResolveShape
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces, now_of
from ess.units import PAGE_ROWS


@dataclass(slots=True, eq=False)
class Piece:
    """Rows of one group, with their ages or, to fill, without. Of those that fill, at most as many
    absent ones as `limit` says, a number of the device that the pieces of a fill share. `stay` is
    the sequence's stay on the device for which the names of the rows hold."""

    sequence: Sequence
    group: int
    rows: RowIds
    ages: RowIds | None
    limit: Tensor | None
    stay: tuple[int, int]


@dataclass(slots=True, eq=False)
class LandingPlace:
    works: ResidencyWorkspaces
    event: CudaEvent
    copies: dict[int, PreparedCopies]


class UnderWay(NamedTuple):
    """A piece that may not have landed: its slots, `row_count` at most, have this ticket, and its
    rows are of these pages."""

    place: LandingPlace
    ticket: int
    group: int
    row_count: int
    pages: PageIds


class Landings:
    """Pieces that are under way land in the order in which they began. None begins while a step is
    open, which has `new_rows`."""

    def __init__(self, pools: DevicePools) -> None:
        self._pools = pools
        width = min(LANDING_ROWS, pools.sparse.row_id_count)
        self._width = width
        shape = ResolveShape.of(query_max=1, top_k=width, block_max=pools.sparse.block_max)
        device = pools.lane.device
        self._places = [
            LandingPlace(
                ResidencyWorkspaces(device, shape, pools.ints, ring=1), CudaEvent(device), {}
            )
            for _ in range(LANDINGS)
        ]
        self._free = list(self._places)
        self._under_way: deque[UnderWay] = deque()
        self._waiting: deque[Piece] = deque()
        self._residencies: dict[tuple[int, int], Residency] = {}
        self._ticket = 1
        self._landed = 1
        self.new_rows = 0

    @property
    def is_busy(self) -> bool:
        self.behind()
        return bool(self._under_way or self._waiting)

    def warm(self, sequence: Sequence, group: int, rows: RowIds, ages: RowIds) -> None:
        """Lands rows as if they had been used `ages` steps ago, newest first."""
        for part in self._parts(rows):
            self._waiting.append(
                Piece(sequence, group, rows[part], ages[part], None, self._stay(sequence))
            )

    def fill(
        self, sequence: Sequence, group: int, rows: RowIds, *, row_max: int | None = None
    ) -> None:
        """Lands the first absent rows, at most `row_max`, while there are free slots."""
        limit = None
        if row_max is not None and row_max < len(rows):
            limit = upload(np.array([row_max], np.int32), self._pools.lane.home)
        for part in self._parts(rows):
            self._waiting.append(
                Piece(sequence, group, rows[part], None, limit, self._stay(sequence))
            )

    def _stay(self, sequence: Sequence) -> tuple[int, int]:
        """Its line, and how often sequences have left that line: after a resume rows have other
        ids."""
        return sequence.line, self._pools.tables.left_count[sequence.line]

    def _parts(self, rows: RowIds) -> list[slice]:
        return [slice(at, at + self._width) for at in range(0, len(rows), self._width)]

    def behind(self) -> int:
        """Up to which ticket all have landed, as far as a look at their events shows."""
        while self._under_way and self._under_way[0].place.event.done():
            place, self._landed, *_ = self._under_way.popleft()
            self._free.append(place)
        return self._landed

    def hold_for(self, new_rows: int) -> int:
        """As `behind`, for a step that claims slots for `new_rows` rows in each group. Compute
        waits for the oldest pieces, until those still under way leave enough slots in their group;
        the host does not wait."""
        landed, last, filling = self.behind(), None, Counter[int]()
        for piece in self._under_way:
            filling[piece.group] += piece.row_count
        for piece in self._under_way:
            if self._leaves(filling, new_rows):
                break
            filling[piece.group] -= piece.row_count
            last, landed = piece, piece.ticket
        if last is not None:
            last.place.event.hold(self._pools.lane.compute)
        return landed

    def hold_for_pages(self, active: PageIds) -> None:
        """Compute waits for the pieces that fill slots with rows of these pages, and so for all
        before them; the host does not."""
        filling = [each for each in self._under_way if np.isin(each.pages, active).any()]
        if filling:
            filling[-1].place.event.hold(self._pools.lane.compute)

    def _leaves(self, filling: Counter[int], new_rows: int) -> bool:
        """Whether every group has slots for the new rows beside those that are being filled."""
        slot_count = self._pools.sparse.slot_count
        return all(count + new_rows <= slot_count(group) for group, count in filling.items())

    def go_on(self) -> None:
        """Starts as many pieces as there are free places, unless a step is open."""
        self.behind()
        while self._waiting and self._free and not self.new_rows:
            piece = self._waiting.popleft()
            if piece.sequence.state == "active" and piece.stay == self._stay(piece.sequence):
                self._start(self._free.pop(), piece)

    @property
    def ticket(self) -> int:
        """The last ticket that a piece was given; 1 if no piece was."""
        return self._ticket

    def restart(self) -> None:
        """Starts tickets over, behind the pieces that are under way: the host waits for these."""
        if self._under_way:
            self._under_way[-1].place.event.wait()
        self.behind()
        assert not self._under_way, f"{len(self._under_way)} pieces landed out of order"
        self._ticket = self._landed = 1

    def drain(self) -> None:
        """Waits until nothing is under way and, unless a step is open, nothing waits to begin."""
        self.go_on()
        while self._under_way:
            self._under_way[0].place.event.wait()
            self.go_on()
        waiting_count = 0 if self.new_rows else len(self._waiting)
        assert not waiting_count, f"{waiting_count} pieces wait beside free places"

    def _start(self, place: LandingPlace, piece: Piece) -> None:
        pools, lane = self._pools, self._pools.lane
        pools.tables.maps.flush()
        now = now_of(
            step=pools.sparse.now,
            ticket=self._ticket,
            landed=pools.sparse.ticket,
            behind=self._landed,
            query_count=1,
        )
        upload_into(place.works.now, np.array(now, np.int32))
        place.works.begin(stream=lane.compute)
        rows, count = self._listed(piece)
        self._residency(place, piece.group).warm(
            rows,
            None if piece.ages is None else upload(piece.ages, lane.home),
            stream=lane.compute,
            count=count,
            host_page_of=pools.tables.maps.host_page_of,
        )
        pools.counting.add_landing(piece.group, place.works.reports)
        at_most = np.zeros(pools.layout.group_count, np.int64)
        at_most[piece.group] = len(piece.rows)
        pools.counting.claims(at_most)
        lane.follow(lane.landings)
        self._copies(place, piece.group).queue(lane.landings.handle, then=place.event)
        self._ticket += 2
        pages = np.unique(piece.rows // PAGE_ROWS)
        self._under_way.append(UnderWay(place, self._ticket, piece.group, len(piece.rows), pages))

    def _listed(self, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """The piece's rows on the device, and how many of them count."""
        rows = upload(piece.rows, self._pools.lane.home)
        if piece.limit is None:
            return rows, None
        absent = self._pools.sparse.slot_of[piece.group].index_select(0, rows) < 0
        taken = absent & (absent.cumsum(0) <= piece.limit)
        order = torch.argsort(taken.to(torch.int32), descending=True, stable=True)
        count = taken.sum(dtype=torch.int32).reshape(1)
        piece.limit -= count
        return rows.index_select(0, order), count

    def _residency(self, place: LandingPlace, group: int) -> Residency:
        key = self._places.index(place), group
        if key not in self._residencies:
            arena, device = self._pools.sparse.arenas[group], self._pools.lane.device
            self._residencies[key] = Residency(device, arena, place.works)
        return self._residencies[key]

    def _copies(self, place: LandingPlace, group: int) -> PreparedCopies:
        if group not in place.copies:
            claims = self._residency(place, group).claims()
            place.copies[group] = self._pools.lane.mover.prepare(self._pools.copies(group, claims))
        return place.copies[group]

    def check(self) -> None:
        tickets = [piece.ticket for piece in self._under_way]
        assert tickets == sorted(set(tickets)), f"landings {tickets} are out of order"
        assert len(self._free) + len(self._under_way) == LANDINGS, "a place is lost"
