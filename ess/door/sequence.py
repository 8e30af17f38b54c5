"""The life of a sequence over the pools: open, grow, preempt, resume, fork, close.

    open --> active <--> preempted        closed is final
               |  `--fork--> active
               `--> closed <-- preempted

An active sequence holds host pages (the truth), active pages (keys, row ids) and a line in the page
tables. A preempted one keeps its host pages only: that is why resuming needs no recompute. Pages
leave the device behind the copies that may still touch them (`InFlight.after`), so a call here
never waits, except to make room when a reservation falls short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ess.door.pools import Pools
from ess.errors import BadInput, BadState, PoolFull
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SEQUENCES, SLOTS
from ess.pool.ledger import Promise as Promise
from ess.pool.ledger import Reservation
from ess.pool.pages import PageIds
from ess.pool.prefix import page_hash, page_hashes, root_hash
from ess.units import PAGE_ROWS, div_ceil

State = Literal["active", "preempted", "closed"]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One request's rows. Made by `Offload.open`; read its fields, let the offload change them.

    `length` counts the leading positions whose rows every main layer has, as far as the host has
    learned; `cached_count` of them came from the prefix cache. `tokens` are what page hashes are
    made of, as far as known. Steps in `step_numbers` are not learned yet; they may have added up to
    `ahead_count` rows more.
    """

    number: int
    tokens: list[int]
    length_max: int | None
    text_hash: bytes
    promise: Promise = "all"
    cached_count: int = 0
    length: int = 0
    line: int = -1
    state: State = "active"
    host_pages: PageIds = field(default_factory=lambda: np.empty(0, np.int32))
    reservation: Reservation | None = None
    published_count: int = 0
    is_arriving: bool = False
    step_numbers: tuple[int, ...] = ()
    ahead_count: int = 0
    closer: Callable[[Sequence], None] | None = None

    def close(self) -> None:
        assert self.closer is not None
        self.closer(self)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *error: object) -> None:
        if self.state != "closed":
            self.close()

    def require(self, *states: State) -> None:
        self.require_state(*states)
        if self.step_numbers:
            raise BadState(
                f"sequence {self.number} is in step {self.step_numbers[0]}; commit it first"
            )

    def require_state(self, *states: State) -> None:
        if self.state not in states:
            raise BadState(f"sequence {self.number} is {self.state}, not {' or '.join(states)}")

    @property
    def length_bound(self) -> int:
        """Where the next step starts at most."""
        return self.length + self.ahead_count

    @property
    def page_count(self) -> int:
        return len(self.host_pages)


def open_sequence(
    pools: Pools,
    number: int,
    tokens: Many[int],
    *,
    length_max: int | None,
    salt: bytes,
    promise: Promise,
    reuse_max: int | None,
) -> Sequence:
    longest = pools.sizes.length_max
    if not 0 < len(tokens) <= (length_max or longest) <= longest:
        raise BadInput(
            f"{len(tokens)} tokens with length_max {length_max}: must be "
            f"1 <= tokens <= length_max <= {longest}"
        )
    pools.inflight.settle()
    prefix, text_hash = _cached_prefix(pools, tokens[: len(tokens) - 1][:reuse_max], salt)
    cached_count = len(prefix) * PAGE_ROWS
    sequence = Sequence(
        number=number,
        tokens=list(tokens),
        length_max=length_max,
        text_hash=text_hash,
        promise=promise,
        cached_count=cached_count,
        length=cached_count,
        published_count=len(prefix),
    )
    pools.latent.hold(prefix)
    try:
        _enter(pools, sequence, prefix, div_ceil(len(sequence.tokens), PAGE_ROWS) - len(prefix))
    except PoolFull:
        pools.latent.drop(prefix)
        raise
    return sequence


def _cached_prefix(pools: Pools, tokens: Many[int], salt: bytes) -> tuple[PageIds, bytes]:
    """Pages of the longest cached prefix of `tokens`, and its hash.

    With MTP its last page is left out: row p of the module was made with token p + 1, and the last
    row of a prefix saw another continuation.
    """
    hashes = page_hashes(tokens, salt=salt)
    pages = pools.latent.prefix.find(hashes)
    if pools.layout.mtp_layer_count:
        pages = pages[:-1]
    return np.array(pages, np.int32), [root_hash(salt), *hashes][len(pages)]


def _enter(pools: Pools, sequence: Sequence, held: PageIds, fresh_count: int) -> None:
    """Reserve, take `fresh_count` host pages behind the `held` ones, become active."""
    page_max = len(held) + fresh_count
    if sequence.length_max is not None:
        page_max = max(page_max, div_ceil(sequence.length_max, PAGE_ROWS))
    if pools.tables.free_count == 0:
        raise PoolFull(
            limiter=SEQUENCES,
            needed=1,
            free=0,
            sentence=f"all {pools.sizes.sequence_max} sequences are active",
        )
    index_max = page_max if sequence.promise == "all" else len(held) + fresh_count
    pools.ledger.require({INDEX_PAGES: page_max})
    needs = {
        SLOTS: pools.slot_need(sequence.length_max),
        HOST_PAGES: page_max - len(held),
        INDEX_PAGES: index_max - len(held) + pools.index.new_count(held),
    }
    sequence.reservation = _reserve(pools, needs)
    fresh = pools.latent.take(fresh_count)
    pools.ledger.draw(sequence.reservation, HOST_PAGES, fresh_count)
    sequence.host_pages = np.concatenate([held, fresh])
    _activate(pools, sequence)


def _reserve(pools: Pools, needs: dict[str, int]) -> Reservation:
    """Pages still leaving may be the room that is missing: let them land before refusing."""
    try:
        return pools.ledger.reserve(needs)
    except PoolFull:
        if pools.inflight.pending_count == 0:
            raise
    pools.inflight.drain()
    return pools.ledger.reserve(needs)


def _activate(pools: Pools, sequence: Sequence) -> None:
    assert sequence.reservation is not None
    new_count = pools.index.new_count(sequence.host_pages)
    active = pools.index.activate(sequence.host_pages, pools.latent)
    pools.ledger.draw(sequence.reservation, INDEX_PAGES, new_count)
    sequence.line = pools.tables.take()
    pools.tables.lines[sequence.line, : len(active)] = active
    pools.tables.lengths[sequence.line] = sequence.length
    sequence.state = "active"


def grow(pools: Pools, growths: Iterable[tuple[Sequence, int]]) -> None:
    """Pages for each sequence up to its new length: all of them, or PoolFull and none."""
    missing = [(seq, div_ceil(length, PAGE_ROWS) - seq.page_count) for seq, length in growths]
    missing = [(seq, count) for seq, count in missing if count > 0]
    shorts = [_short(sequence, count) for sequence, count in missing]
    total = {name: sum(short[name] for short in shorts) for name in (HOST_PAGES, INDEX_PAGES)}
    if any(total.values()):
        pools.ledger.release(_reserve(pools, total))
    for (sequence, count), short in zip(missing, shorts, strict=True):
        _add_pages(pools, sequence, count, short)


def _short(sequence: Sequence, count: int) -> dict[str, int]:
    """What `count` more pages need beyond what was promised."""
    assert sequence.reservation is not None
    promised = sequence.reservation.promised
    return {name: max(0, count - promised[name]) for name in (HOST_PAGES, INDEX_PAGES)}


def _add_pages(pools: Pools, sequence: Sequence, count: int, short: dict[str, int]) -> None:
    assert sequence.reservation is not None
    pools.ledger.extend(sequence.reservation, short)
    fresh = pools.latent.take(count)
    active = pools.index.activate(fresh, pools.latent)
    pools.ledger.draw(sequence.reservation, HOST_PAGES, count)
    pools.ledger.draw(sequence.reservation, INDEX_PAGES, count)
    first = sequence.page_count
    pools.tables.lines[sequence.line, first : first + count] = active
    sequence.host_pages = np.concatenate([sequence.host_pages, fresh])


def preempt(pools: Pools, sequence: Sequence) -> None:
    sequence.require("active")
    _leave_device(pools, sequence)
    sequence.state = "preempted"


def resume(pools: Pools, sequence: Sequence) -> None:
    sequence.require("preempted")
    pools.inflight.drain()
    _enter(pools, sequence, sequence.host_pages, 0)


def close(pools: Pools, sequence: Sequence) -> None:
    sequence.require("active", "preempted")
    if sequence.state == "active":
        _leave_device(pools, sequence)
    sequence.state = "closed"

    def let_go() -> None:
        publish(pools, sequence)
        pools.latent.drop(sequence.host_pages)
        sequence.host_pages = np.empty(0, np.int32)

    pools.inflight.after(let_go)


def _leave_device(pools: Pools, sequence: Sequence) -> None:
    active = pools.tables.lines[sequence.line, : sequence.page_count].copy()
    pools.tables.give_back(sequence.line)
    sequence.line = -1
    assert sequence.reservation is not None
    pools.ledger.release(sequence.reservation)
    sequence.reservation = None
    leaving = pools.index.leave(active)

    def free() -> None:
        pools.sparse.drop_pages(leaving)
        pools.index.free(leaving)

    pools.inflight.after(free)


def fork(pools: Pools, parent: Sequence, number: int) -> Sequence:
    """A second sequence with the same rows so far: full pages shared, the partial one copied."""
    parent.require("active")
    pools.inflight.drain()
    refresh(pools, parent)
    shared = parent.host_pages[: parent.length // PAGE_ROWS]
    child = Sequence(
        number=number,
        tokens=parent.tokens[: parent.length],
        length_max=parent.length_max,
        promise=parent.promise,
        text_hash=parent.text_hash,
        cached_count=len(shared) * PAGE_ROWS,
        length=parent.length,
        published_count=parent.published_count,
    )
    pools.latent.hold(shared)
    try:
        _enter(pools, child, shared, div_ceil(parent.length, PAGE_ROWS) - len(shared))
    except PoolFull:
        pools.latent.drop(shared)
        raise
    if parent.length % PAGE_ROWS:
        _copy_partial(pools, parent, child, len(shared))
    return child


def _copy_partial(pools: Pools, parent: Sequence, child: Sequence, page: int) -> None:
    pools.latent.copy_page(int(parent.host_pages[page]), int(child.host_pages[page]))
    lines = pools.tables.lines
    pools.index.keys.copy_page(int(lines[parent.line, page]), int(lines[child.line, page]))


def refresh(pools: Pools, sequence: Sequence) -> None:
    """Take notice of what has been imported since."""
    if sequence.is_arriving:
        sequence.is_arriving = False
        sequence.length = pools.latent.leading_count(sequence.host_pages)
        pools.tables.lengths[sequence.line] = sequence.length
        publish(pools, sequence)


def host_rows(sequence: Sequence, start: int, count: int) -> PageIds:
    """Host rows of `count` positions from `start` on."""
    positions = np.arange(start, start + count, dtype=np.int32)
    pages = sequence.host_pages[positions // PAGE_ROWS]
    rows: PageIds = pages * np.int32(PAGE_ROWS) + positions % np.int32(PAGE_ROWS)
    return rows


def publish(pools: Pools, sequence: Sequence) -> None:
    """Publish the pages that are complete and whose text is known, in order."""
    full_count = min(sequence.length, len(sequence.tokens)) // PAGE_ROWS
    for page in range(sequence.published_count, full_count):
        host_page = int(sequence.host_pages[page])
        if not pools.latent.is_complete(host_page):
            return
        text = sequence.tokens[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
        sequence.text_hash = page_hash(sequence.text_hash, text)
        sequence.published_count = page + 1
        pools.latent.publish(host_page, sequence.text_hash)
