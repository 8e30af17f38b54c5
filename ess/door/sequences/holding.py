"""The part of the pools that a sequence holds: host pages and, while it is active, a line of active
pages.

A sequence that was never on the device keeps the host pages of its growth promised, so that it can
always enter; a preempted sequence has no promises.

Pages leave the device behind the copies that may still touch them (`InFlight.after`), so nothing in
here waits, except to make room when a promise falls short. A call that takes pages and raises,
PoolFull or anything else, has changed nothing: what it took so far goes back (`undo`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Final

import numpy as np

from ess.array_types import Bytes, PageIds
from ess.door.memory.pools import Pools
from ess.errors import BadState, PoolFull
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SEQUENCES
from ess.pool.index import NONE
from ess.pool.ledger import Promise, Reservation
from ess.units import PAGE_ROWS, div_ceil

NO_PAGES: Final = np.empty(0, np.int32)


class Holding:
    """`host_pages` are the truth of every position; `line` is -1 unless it is on the device. Until
    then `saved` is what it keeps beside its rows, if that is there."""

    def __init__(self, pools: Pools, *, length_max: int | None, promise: Promise) -> None:
        self.host_pages: PageIds = NO_PAGES
        self.line = NONE
        self._pools = pools
        self._length_max = length_max
        self._promise = promise
        self._reservation: Reservation | None = None
        self.saved: Bytes | None = None
        self._give_back: Callable[[], None] | None = None

    @property
    def page_count(self) -> int:
        return len(self.host_pages)

    def host_rows(self, start: int, count: int) -> PageIds:
        """Host rows of `count` positions from `start` on."""
        stop = start + count
        assert 0 <= start <= stop <= self.page_count * PAGE_ROWS, f"{start}..{stop} of {self!r}"
        positions = np.arange(start, stop, dtype=np.int32)
        pages = self.host_pages[positions // PAGE_ROWS]
        rows: PageIds = pages * np.int32(PAGE_ROWS) + positions % np.int32(PAGE_ROWS)
        return rows

    def host_row(self, position: int) -> int:
        """As `host_rows`, quick for one position."""
        assert position >= 0, f"a position of {position}"
        page = int(self.host_pages[position // PAGE_ROWS])
        return page * PAGE_ROWS + position % PAGE_ROWS

    def row_ids(self, start: int, count: int) -> PageIds:
        assert self.line != NONE, "what is not on the device has no row ids"
        return self._pools.tables.rows(self.line, start, count)

    # ---- on the device

    def open(
        self,
        shared: PageIds,
        page_count: int,
        *,
        length: int,
        text: int,
        state: Bytes | None = None,
    ) -> None:
        """Pages that other holders have too, and fresh ones behind them, `page_count` in all. The
        rows that are there are of `text` tokens, and `state` was kept beside them."""
        assert not self.page_count, "a holding is opened once"
        self.saved = state
        assert len(shared) <= page_count, f"{len(shared)} shared pages of {page_count}"
        latent, fresh_count = self._pools.latent, page_count - len(shared)
        latent.ask(shared)
        with ExitStack() as undo:
            undo.callback(latent.refuse, shared)
            self._enter(shared, fresh_count, length, text, undo)

    def open_on_host(self, shared: PageIds, page_count: int) -> None:
        """As `open`, but without slots or index pages until the sequence resumes."""
        assert not self.page_count, "a holding is opened once"
        pools, fresh_count = self._pools, page_count - len(shared)
        assert fresh_count >= 0, f"{len(shared)} shared pages of {page_count}"
        pools.latent.ask(shared)
        with ExitStack() as undo:
            undo.callback(pools.latent.refuse, shared)
            needs = self._needs(shared, fresh_count)
            pools.ledger.require(needs)
            _make_room(pools, {HOST_PAGES: needs[HOST_PAGES]})
            host_pages = np.concatenate([shared, self._take(fresh_count, undo)])
            undo.pop_all()
        self._reservation = pools.ledger.reserve({HOST_PAGES: needs[HOST_PAGES] - fresh_count})
        self.host_pages = host_pages

    def resume(self, *, length: int, text: int) -> None:
        assert self.line == NONE, f"line {self.line} is on the device already"
        assert self.page_count, "a holding that was let go cannot resume"
        if self._pools.states is not None and text and self.saved is None:
            raise BadState(
                f"there are rows of {text} tokens, and nothing that is kept beside them: a handoff"
                " brings that, or open another sequence on the device"
            )
        with ExitStack() as undo:
            self._enter(self.host_pages, 0, length, text, undo)

    def _admit(self, held: PageIds, fresh_count: int) -> dict[str, int]:
        """Makes sure that there is room for what `_enter` takes and what the sequence is promised
        then. Returns the sum of both, less what it is promised now."""
        pools = self._pools
        assert self.line == NONE, f"line {self.line} is on the device already"
        if pools.tables.free_count == 0:
            raise PoolFull(
                limiter=SEQUENCES,
                needed=1,
                free=0,
                shortage=f"all {pools.sizes.sequence_max} sequences are active",
                sentence=f"all {pools.sizes.sequence_max} sequences are active; raise "
                f"sequence_max, or preempt or close a sequence",
            )
        needs = self._needs(held, fresh_count)
        if self._reservation is not None:
            promised = self._reservation.promised
            needs = {name: max(0, count - promised[name]) for name, count in needs.items()}
        _make_room(pools, needs)
        return needs

    def _enter(
        self, held: PageIds, fresh_count: int, length: int, text: int, undo: ExitStack
    ) -> None:
        """Takes `fresh_count` host pages behind the `held` pages and becomes active."""
        pools = self._pools
        needs = self._admit(held, fresh_count)
        host_pages = np.concatenate([held, self._take(fresh_count, undo)])
        assert 0 <= length <= len(host_pages) * PAGE_ROWS, f"{length} rows, {len(host_pages)} pages"
        new_count = pools.index.new_count(host_pages)
        line = pools.tables.enter(self._activate(host_pages, undo), length)
        undo.callback(pools.tables.give_back, line)
        pools.tables.set_text(line, text)
        if pools.states is not None:
            pools.states.enter(line, self.saved)
        undo.pop_all()
        self.host_pages, self.line = host_pages, line
        needs[HOST_PAGES] -= fresh_count
        needs[INDEX_PAGES] -= new_count
        if self._reservation is None:
            self._reservation = pools.ledger.reserve(needs)
        else:
            pools.ledger.extend(self._reservation, needs)
        if pools.states is not None:
            self._forget_saved()

    def _take(self, count: int, undo: ExitStack) -> PageIds:
        fresh = self._pools.latent.take(count)
        undo.callback(self._pools.latent.drop, fresh)
        return fresh

    def _activate(self, host_pages: PageIds, undo: ExitStack) -> PageIds:
        active = self._pools.index.activate(host_pages, self._pools.latent)
        undo.callback(self._deactivate, active)
        return active

    def _deactivate(self, active: PageIds) -> None:
        """No line names these pages for this holding any more."""
        pools = self._pools
        leaving = pools.index.leave(active)

        def free() -> None:
            pools.sparse.drop_pages(leaving)
            pools.index.free(leaving)

        pools.inflight.after(free)

    def _needs(self, held: PageIds, fresh_count: int) -> dict[str, int]:
        """Refuses what not even empty pools could hold."""
        pools = self._pools
        page_max = page_count = len(held) + fresh_count
        if self._length_max is not None:
            page_max = max(page_max, pools.layout.pages_of(self._length_max))
        pools.ledger.require({INDEX_PAGES: page_max})
        index_max = page_max if self._promise == "all" else page_count
        return {
            **pools.slot_needs(self._length_max),
            HOST_PAGES: page_max - len(held),
            INDEX_PAGES: index_max - len(held) + pools.index.new_count(held),
        }

    @property
    def state(self) -> Bytes:
        """The state that the sequence keeps beside its rows, on the device."""
        assert self.line != NONE, "what is not on the device has no state there"
        assert self._pools.states is not None, "the layout has nothing beside rows"
        return self._pools.states.line(self.line, self._length_max)

    def save_state(self) -> None:
        """Copies the state to the host, where it stays until the sequence is active again."""
        if self._pools.states is not None:
            self.saved = self.state.copy()

    def lend(self, state: Bytes, give_back: Callable[[], None]) -> None:
        """The state lies in memory of another owner, which gets it back by `give_back` once the
        sequence is on the device or closed."""
        self._forget_saved()
        self.saved, self._give_back = state, give_back

    def _forget_saved(self) -> None:
        self.saved, give_back = None, self._give_back
        self._give_back = None
        if give_back is not None:
            give_back()

    def keep_state(self, content: bytes, text: int) -> None:
        """Keeps a copy of the state, for sequences that begin with this text."""
        states = self._pools.states
        assert states is not None, "the layout has nothing beside rows"
        state = states.line(self.line, text) if self.saved is None else self.saved
        states.kept.keep(content, state)

    def copy_page(self, other: Holding, page: int) -> None:
        """The rows and keys of a page that is there in part."""
        pools, lines = self._pools, self._pools.tables.lines
        pools.latent.copy_page(int(self.host_pages[page]), int(other.host_pages[page]))
        pools.index.copy_page(int(lines[self.line, page]), int(lines[other.line, page]))
        pools.latent.say()

    def copy_state(self, other: Holding) -> None:
        if self._pools.states is not None:
            self._pools.states.copy(self.line, other.line)

    def leave_device(self) -> None:
        """Slots, active pages, line and reservation go; the host pages stay."""
        pools = self._pools
        assert self.line != NONE, "what leaves the device is on it"
        active = pools.tables.lines[self.line, : self.page_count].copy()
        pools.tables.give_back(self.line)
        self.line = NONE
        assert self._reservation is not None, "what is active has a reservation"
        pools.ledger.release(self._reservation)
        self._reservation = None
        self._deactivate(active)

    def give_up_first(self, count: int) -> None:
        """The leading host pages go, and the others stay; for a while only."""
        assert self.line == NONE, f"line {self.line} reads the pages"
        assert 0 < count <= self.page_count, f"{count} of {self.page_count} pages"
        self._pools.latent.drop(self.host_pages[:count])
        self.host_pages = self.host_pages[count:]

    def take_first(self, known: PageIds, fresh_count: int) -> PageIds:
        """Pages before the others again: `known` ones, and behind them fresh ones, which are
        returned. PoolFull if there is no room."""
        pools = self._pools
        pools.latent.hold(known)
        with ExitStack() as undo:
            undo.callback(pools.latent.drop, known)
            _make_room(pools, {HOST_PAGES: fresh_count})
            fresh = self._take(fresh_count, undo)
            host_pages = np.concatenate([known, fresh, self.host_pages])
            undo.pop_all()
        self.host_pages = host_pages
        return fresh

    def let_go(self) -> None:
        """The host pages too: published ones stay as prefix cache while there is room."""
        assert self.line == NONE, f"line {self.line} is still on the device"
        self._forget_saved()
        if self._reservation is not None:
            self._pools.ledger.release(self._reservation)
            self._reservation = None
        self._pools.latent.drop(self.host_pages)
        self.host_pages = NO_PAGES

    # ---- growth

    def short(self, count: int) -> dict[str, int]:
        """The needs of `count` more pages beyond what is promised."""
        assert self._reservation is not None, "what grows is active"
        promised = self._reservation.promised
        return {name: max(0, count - promised[name]) for name in (HOST_PAGES, INDEX_PAGES)}

    def add(self, count: int, short: dict[str, int]) -> None:
        """Adds pages, of which `short` are beyond the promise; `grow` has checked that they fit."""
        pools, first = self._pools, self.page_count
        assert self._reservation is not None, "what grows is active"
        assert 0 < count <= pools.tables.page_max - first, f"{count} pages behind {first}"
        with ExitStack() as undo:
            fresh = self._take(count, undo)
            active = self._activate(fresh, undo)
            host_pages = np.concatenate([self.host_pages, fresh])
            pools.tables.extend(self.line, first, active)
            undo.pop_all()
        self.host_pages = host_pages
        for name, missing in short.items():
            pools.ledger.draw(self._reservation, name, count - missing)

    def check(self) -> None:
        """On the device its line names the active page of each host page, and nothing else."""
        if self.line == NONE:
            promised = {} if self._reservation is None else dict(self._reservation.promised)
            promised.pop(HOST_PAGES, None)
            assert not any(promised.values()), f"it is not on the device and reserves {promised}"
            return
        tables, count = self._pools.tables, self.page_count
        assert self._reservation is not None, f"line {self.line} has no reservation"
        assert self._reservation.is_open, f"line {self.line} has a released reservation"
        active, line = self._pools.index.active_of(self.host_pages), tables.lines[self.line]
        assert (line[:count] == active).all(), f"line {self.line} names other pages than it holds"
        assert (line[count:] == NONE).all(), f"line {self.line} names more than {count} pages"


def grow(pools: Pools, growths: Iterable[tuple[Holding, int]]) -> None:
    """Pages for each holding up to its new length: all of them, or PoolFull and none. Behind any
    other error some holdings may have theirs, for the step that brings the rows later."""
    missing = [
        (held, div_ceil(length, PAGE_ROWS) - held.page_count)
        for held, length in growths
        if length > len(held.host_pages) * PAGE_ROWS
    ]
    if not missing:
        return
    shorts = [held.short(count) for held, count in missing]
    total = {name: sum(short[name] for short in shorts) for name in (HOST_PAGES, INDEX_PAGES)}
    holders = {id(held) for held, _ in missing}
    assert len(holders) == len(missing), "a holding grows twice at once"
    if any(total.values()):
        _make_room(pools, total)
    for (held, count), short in zip(missing, shorts, strict=True):
        held.add(count, short)


def _make_room(pools: Pools, needs: dict[str, int]) -> None:
    """PoolFull if there is no room, also not when all pages that still leave have left."""
    try:
        pools.ledger.require_free(needs)
        return
    except PoolFull:
        if pools.inflight.pending_count == 0:
            raise
    pools.inflight.drain()
    pools.ledger.require_free(needs)
