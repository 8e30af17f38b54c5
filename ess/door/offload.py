"""The library door: everything an engine of one's own calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch

from ess.clock import Clock, RealClock
from ess.door import arrival, stepping
from ess.door import sequence as life
from ess.door.budgets import Budgets
from ess.door.checks import as_array, counts, in_range
from ess.door.pools import Pools, PoolSizes, build_pools
from ess.door.refill import Refill
from ess.door.residency import Residency
from ess.door.sequence import Promise, Sequence
from ess.door.stats import Counters, Stats
from ess.door.step import Resolution, Rows, Step, as_resolution
from ess.door.timings import Timings
from ess.door.transit import differing_slots
from ess.door.workspace import Part, layer_view, make_part
from ess.errors import BadInput, BadState
from ess.flashtrans.lanes import open_lane
from ess.kernels.served import refuse_cuda
from ess.kernels.streams import Lane
from ess.layout import ModelLayout
from ess.pool.lru.arena import FetchPlan
from ess.units import PAGE_ROWS, parse_size


class Offload:
    """Sparse residency for an engine of your own, in plain tensors.

    Rows live on the host, a working set of them in slots on the device. Per step and layer:
    `append` new rows, `resolve` the selection, attend hits at once and misses after `wait()`,
    merge; then `commit` what was accepted. One owner, one thread: copies run on a lane of their
    own, but an Offload is not to be shared between threads. A context manager.
    """

    def __init__(
        self, pools: Pools, parts: list[Part], lane: Lane, query_max: int, clock: Clock
    ) -> None:
        self.layout = pools.layout
        self._pools = pools
        self._parts = parts
        self._lane = lane
        self._query_max = query_max
        self.clock = clock
        self._counters = Counters(pools.layout)
        self.timings = Timings(layout=pools.layout, clock=clock)
        self._residency = Residency(pools)
        self._refill = Refill(pools, self._residency)
        self._budgets = Budgets(pools, query_max)
        self._views = [layer_view(pools, layer) for layer in range(pools.layout.layer_total)]
        self._step: Step | None = None
        self._sealed: deque[Step] = deque()
        self._opened_count = 0
        self._is_open = True

    @classmethod
    def create(
        cls,
        layout: ModelLayout,
        *,
        slot_bytes: int | str,
        host_bytes: int | str,
        index_bytes: int | str | None = None,
        device: str = "cpu",
        sequence_max: int = 64,
        length_max: int | str = "128k",
        query_max: int = 256,
        part_max: int = 4,
        slot_floor: int | None = None,
        lane: Lane | None = None,
        clock: Clock | None = None,
        poison: bool = False,
    ) -> Offload:
        """Allocates everything it will ever use.

        `query_max` bounds the queries of one step, `part_max` the parts under way at once.
        Copies run beside compute unless another `lane` is given; waits for them are timed on
        `clock`. `poison` fills freed and unwritten rows with 0xFF, which is NaN: for tests.
        """
        given = {"sequence_max": sequence_max, "query_max": query_max, "part_max": part_max}
        for name, value in given.items():
            in_range(name, value, 1, 1 << 20)
        refuse_cuda("device", device)
        sizes = PoolSizes(
            slot_bytes=parse_size(slot_bytes),
            host_bytes=parse_size(host_bytes),
            index_bytes=None if index_bytes is None else parse_size(index_bytes),
            sequence_max=sequence_max,
            length_max=parse_size(length_max),
            slot_floor=slot_floor or layout.slot_floor,
            poison=poison,
        )
        opened = lane or open_lane(device=device)
        pools = build_pools(layout, sizes, opened)
        parts = [make_part(pools, query_max) for _ in range(part_max)]
        return cls(pools, parts, opened, query_max, clock or RealClock())

    # ---- what may be read

    @property
    def length_max(self) -> int:
        """The longest sequence that may be opened."""
        return self._pools.sizes.length_max

    @property
    def sequence_max(self) -> int:
        """How many sequences can be active; their lines are 0 up to this."""
        return self._pools.sizes.sequence_max

    def slots(self, layer: int) -> torch.Tensor:
        """[slab rows, row_bytes]: where the hits and misses of this layer are."""
        self.layout.check_layer(layer)
        return self._views[layer].slots

    def host(self, layer: int) -> torch.Tensor:
        """[host rows, row_bytes]: where rows without a slot are read in place."""
        self.layout.check_layer(layer)
        return self._views[layer].host

    def key_pages(self, layer: int) -> torch.Tensor:
        """[active pages, page_bytes]: index keys of this layer's group, block-split."""
        self.layout.check_layer(layer)
        return self._views[layer].key_pages

    def page_table(self, sequences: Many[Sequence]) -> torch.Tensor:
        """[sequences, pages] active pages, -1 padded: for the indexer."""
        lines = [one.line for one in sequences]
        if min(lines, default=0) < 0:
            raise BadState("a preempted or closed sequence has no pages on the device")
        return torch.from_numpy(self._pools.tables.lines[lines])

    def host_rows(self, sequence: Sequence, start: int, count: int) -> torch.Tensor:
        """Rows of `host(layer)` that hold `count` positions from `start` on."""
        in_range("start", start, 0, sequence.page_count * PAGE_ROWS)
        in_range("count", count, 0, sequence.page_count * PAGE_ROWS - start)
        return torch.from_numpy(life.host_rows(sequence, start, count))

    def active_rows(self, sequence: Sequence, start: int, count: int) -> torch.Tensor:
        """Row ids of these positions: page * 64 + offset in `key_pages`."""
        sequence.require("active")
        in_range("start", start, 0, sequence.page_count * PAGE_ROWS)
        in_range("count", count, 0, sequence.page_count * PAGE_ROWS - start)
        return torch.from_numpy(self._pools.tables.rows(sequence.line, start, count))

    def stats(self) -> Stats:
        return self._counters.read(self._pools, self.timings)

    def all_resident(self, sequences: Many[Sequence]) -> bool:
        """Every row of these sequences is in a slot, in every layer."""
        return not self._residency.lacking(sequences)

    @property
    def is_scarce(self) -> bool:
        """Slots are running out: selections must be stamped (`resolve`), `locate` does not."""
        return self._residency.is_scarce()

    def verify(self, layer: int) -> list[tuple[int, int]]:
        """(slot, row id) of every clean slot whose bytes are not those of its row on the host."""
        self.layout.check_layer(layer)
        slots, rows = differing_slots(self._pools, layer)
        return list(zip(slots.tolist(), rows.tolist(), strict=True))

    def check(self) -> None:
        """Audit every pool; raises AssertionError with coordinates."""
        self._pools.check()

    # ---- sequences

    def open(
        self,
        tokens: Many[int],
        *,
        length_max: int | None = None,
        promise: Promise = "all",
        salt: bytes = b"",
        reuse_max: int | None = None,
    ) -> Sequence:
        """Room for a sequence, or PoolFull with the limiter and the numbers.

        Rows of the longest cached prefix, of at most `reuse_max` tokens, are there already
        (`cached_count`); import the rest. With `length_max` all of its growth is promised now;
        without, growth may meet PoolFull later. `promise="some"` promises the growth on the host
        only: device pages may meet PoolFull. Sequences with different `salt` never share rows.
        """
        self._require_open()
        opened = life.open_sequence(
            self._pools,
            self._opened_count,
            tokens,
            length_max=length_max,
            salt=salt,
            promise=promise,
            reuse_max=reuse_max,
        )
        self._opened_count += 1
        opened.closer = self._close_sequence
        return opened

    def _close_sequence(self, sequence: Sequence) -> None:
        """Its full stored pages stay as prefix cache while there is room."""
        if self._step is not None and sequence in self._step.sequences:
            self.abandon(self._step)
        life.close(self._pools, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Give up slots and index pages; the rows stay on the host."""
        life.preempt(self._pools, sequence)

    def resume(self, sequence: Sequence) -> None:
        """Take index pages again and reload keys: nothing is computed anew."""
        life.resume(self._pools, sequence)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same rows so far."""
        self._require_open()
        child = life.fork(self._pools, sequence, self._opened_count)
        self._opened_count += 1
        child.closer = self._close_sequence
        return child

    def forget_prefixes(self) -> int:
        """Nothing said before is found again; returns how many pages of prefix cache that were.

        BadState while a sequence holds one of them: who forked it or found it reads its rows.
        """
        self._require_open()
        self.drain()
        latent = self._pools.latent
        if latent.prefix.held_count:
            raise BadState(f"{latent.prefix.held_count} cached pages are held by open sequences")
        return latent.forget()

    # ---- arrival

    def import_rows(self, sequence: Sequence, *, layer: int, start: int, rows: Any) -> None:
        """Rows made elsewhere (prefill), any layer order: uint8 [n, row_bytes] from `start` on."""
        self.layout.check_layer(layer)
        array = as_array(rows, "rows", "uint8", (None, self.layout.row_bytes))
        arrival.import_rows(self._pools, sequence, layer, start, array)
        self._refill.wake(sequence)

    def import_keys(self, sequence: Sequence, *, layer: int, start: int, keys: Any) -> None:
        """Index keys, one record per position: values, then the scale."""
        group = arrival.key_group(self.layout, layer)
        array = as_array(keys, "keys", "uint8", (None, self._pools.index.keys.key_bytes))
        arrival.import_keys(self._pools, sequence, group, start, array)

    def warm(self, sequence: Sequence, windows: Any) -> None:
        """Selections of the last prefill queries, [groups, windows, k] positions, oldest first."""
        array = as_array(windows, "windows", "int32", (self.layout.group_count, None, None))
        self._moved(arrival.warm(self._pools, sequence, array))

    def fill(self, sequence: Sequence, *, row_max: int | None = None) -> int:
        """Copy rows into free slots while these last; returns how many rows were started."""
        return self._moved(arrival.fill(self._pools, sequence, row_max))

    def refill(self, sequences: Many[Sequence]) -> int:
        """Behind a step: some absent rows of one of these into free slots; returns how many."""
        if self._step is not None:
            raise BadState(f"step {self._step.number} is not committed")
        return self._moved(self._refill.go_on(sequences))

    def _moved(self, plans: list[FetchPlan]) -> int:
        for plan in plans:
            self._counters.moved(plan)
        return sum(len(plan.rows) for plan in plans)

    # ---- a step

    def begin(self, sequences: Many[Sequence], *, query_counts: Many[int]) -> Step:
        """Each sequence brings `query_counts` new rows; PoolFull if their pages do not fit.

        One earlier step may be sealed and not learned: pages are provided for the most that it can
        have accepted, and positions follow the device's own lengths.
        """
        self._require_open()
        if self._step is not None:
            raise BadState(f"step {self._step.number} is not committed")
        if len(self._sealed) > 1:
            raise BadState(f"step {self._sealed[0].number} is not learned")
        listed = counts("query_counts", query_counts, len(sequences))
        in_range("the queries of a step", sum(listed), 1, self._query_max)
        self._step = stepping.begin(self._pools, tuple(sequences), listed)
        self._counters.step_count += 1
        return self._step

    def append(
        self, layer: int, rows: Any, step: Step, *, keys: Any = None, first_query: int = 0
    ) -> None:
        """New rows of this layer, [queries, row_bytes], and their index keys.

        Those of all queries of the step, or, in batch order, of a part of them from `first_query`.
        """
        self._require_step(step, layer)
        array = as_array(rows, "rows", "uint8", (None, self.layout.row_bytes))
        _require_part(step, first_query, len(array), "the rows of a part")
        if keys is not None:
            arrival.key_group(self.layout, layer)
            keys = as_array(keys, "keys", "uint8", (len(array), self._pools.index.keys.key_bytes))
        stepping.append(self._pools, step, layer, array, keys, first_query)

    def resolve(
        self,
        layer: int,
        selection: Any,
        step: Step,
        *,
        first_query: int = 0,
        part: int | None = None,
        waits: bool = False,
    ) -> Resolution:
        """Where the selected positions are; the missing ones are under way when this returns.

        `selection` is int32 [queries, k], ascending, -1 padded, for the queries from `first_query`
        on: parts are resolved in batch order. Layers that share a selection pass None after their
        group's first layer has been resolved. The answer lies in workspace number `part`, by
        default how many parts of this group came before: name it when two halves of a step are in
        different layers at once, so that neither takes the other's. Whoever `waits` before doing
        anything else says so: then no other thread is woken for the copy.
        """
        self._require_step(step)
        group, member = self.layout.place_of(layer)
        key = (group, first_query)
        if member == 0:
            array = self._selected(selection, step, first_query)
            room = self._part_for(step, group, part)
            room.lookup.at_once_bytes = self._pools.at_once_max(waits=waits)
            plan = stepping.resolve(self._pools, step, group, array, first_query, room)
            self._counters.planned(plan)
        elif key not in step.resolved:
            raise BadState(f"layer {layer} follows layer {self.layout.groups[group][0]}: first")
        resolved, settle = stepping.resolved(step, layer, key), self._pools.inflight.settle_until
        if resolved.plan.is_pending:
            settle_timed = self.timings.watch(layer, first_query, settle)
            return as_resolution(resolved, resolved.events[member], settle_timed)
        return as_resolution(resolved, None, settle)

    def locate(
        self, layer: int, selection: Any, step: Step, *, queries: Many[int] | None = None
    ) -> torch.Tensor:
        """Slots of the selected rows that are resident, -1 where one is not. Nothing is fetched.

        `queries` says which queries of the step the lines of `selection` belong to; all, if None.
        """
        self._require_step(step, layer)
        chosen = range(step.query_count) if queries is None else queries
        array = as_array(selection, "selection", "int32", (len(chosen), self.layout.top_k))
        for query in chosen:
            in_range("a query", query, 0, step.query_count - 1)
        numbers = np.array(chosen, np.int32)
        return torch.from_numpy(stepping.locate(self._pools, step, layer, array, numbers))

    def locate_all(
        self, layer: int, selection: Any, step: Step, *, first_query: int = 0
    ) -> torch.Tensor | None:
        """`locate` for the queries from `first_query` on; None when a selected row is absent."""
        self._require_step(step, layer)
        array = self._selected(selection, step, first_query)
        slots = np.empty_like(array)
        absent_count = stepping.locate_into(
            self._pools, step, layer, array, first_query, lookup=self._parts[0].lookup, out=slots
        )
        if absent_count:
            return None
        self._counters.located(self.layout.group_of(layer), array)
        return torch.from_numpy(slots)

    def host_codes(
        self, layer: int, selection: Any, step: Step, *, first_query: int = 0
    ) -> torch.Tensor:
        """The selection as codes that read the host's rows, whatever is resident: for checks."""
        self._require_step(step, layer)
        array = self._selected(selection, step, first_query)
        return torch.from_numpy(stepping.host_codes(self._pools, step, layer, array, first_query))

    def _selected(self, selection: Any, step: Step, first_query: int) -> Rows:
        array: Rows = as_array(selection, "selection", "int32", (None, self.layout.top_k))
        _require_part(step, first_query, len(array), "selection rows")
        return array

    def _part_for(self, step: Step, group: int, number: int | None) -> Part:
        taken = [one.part for (other, _), one in step.resolved.items() if other == group]
        chosen = len(taken) if number is None else number
        if not 0 <= chosen < len(self._parts):
            raise BadInput(f"part {chosen} of group {group}: part_max is {len(self._parts)}")
        if self._parts[chosen] in taken:
            raise BadState(f"part {chosen} of group {group} is resolved already")
        return self._parts[chosen]

    def commit(
        self, step: Step, *, accepted: Many[int], tokens: Many[Many[int]] | None = None
    ) -> None:
        """Keep the first `accepted` new rows of each sequence; the others are gone.

        `tokens` are the ids that the kept rows were computed from; pages whose ids are known
        become prefix cache.
        """
        if self._sealed:
            raise BadState(f"step {self._sealed[0].number} is not learned")
        self._require_step(step)
        stepping.check_tokens(step, self._accepted(step, accepted), tokens)
        self.seal(step, accepted=accepted)
        self.learn(step, accepted=accepted, tokens=tokens)

    def seal(self, step: Step, *, accepted: Many[int]) -> None:
        """The device's half of `commit`: rows leave or go, the next step may begin."""
        self._require_step(step)
        self._counters.stored(stepping.seal(self._pools, step, self._accepted(step, accepted)))
        self._step = None
        self.timings.landed(step)
        self._sealed.append(step)

    def learn(
        self, step: Step, *, accepted: Many[int], tokens: Many[Many[int]] | None = None
    ) -> None:
        """The host's half of `commit`, for sealed steps in their order."""
        self._require_open()
        if not self._sealed or self._sealed[0] is not step:
            raise BadState(f"step {step.number} is not the oldest sealed step")
        stepping.learn(self._pools, step, self._accepted(step, accepted), tokens)
        self._sealed.popleft()

    def _accepted(self, step: Step, accepted: Many[int]) -> list[int]:
        listed = counts("accepted", accepted, len(step.sequences))
        for kept, brought in zip(listed, step.query_counts, strict=True):
            in_range("accepted", kept, 0, brought)
        return listed

    def abandon(self, step: Step) -> None:
        """Give the step up: none of its rows are kept."""
        self.commit(step, accepted=[0] * len(step.sequences))

    def _require_step(self, step: Step, layer: int = 0) -> None:
        self._require_open()
        if self._step is not step:
            raise BadState(f"step {step.number} is not the open step")
        self.layout.check_layer(layer)

    # ---- budgets and the end

    def move_budget(self, *, source: int, target: int) -> bool:
        """One chunk of slots from group `source` to group `target`.

        False if all are in use, or promised to running sequences.
        """
        for name, group in (("source", source), ("target", target)):
            in_range(name, group, 0, self.layout.group_count - 1)
        if source == target:
            raise BadInput(f"source and target are both group {source}")
        if self._pools.sparse.chunk_counts()[source] <= self._budgets.floor(source):
            return False
        self._pools.inflight.settle()
        return self._pools.sparse.move_chunk(source, target)

    def rebalance(self) -> int:
        """Move some slots to the groups whose misses they save most; returns how many chunks.

        Decided from what has happened since the last call, so call it every some dozen steps.
        """
        self._require_open()
        if self._step is not None or self._sealed:
            raise BadState("budgets move between steps, when all are learned")
        self._pools.inflight.settle()
        return self._budgets.rebalance(self._counters.misses())

    def drain(self) -> None:
        """Wait until every copy under way has landed."""
        self._pools.inflight.drain()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._pools.inflight.drain()
            self._lane.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise BadState("this offload is closed")


def _require_part(step: Step, first_query: int, count: int, name: str) -> None:
    """`count` queries of the step, one at least, from `first_query` on."""
    if not 0 <= first_query < first_query + count <= step.query_count:
        in_range("first_query", first_query, 0, step.query_count - 1)
        in_range(name, count, 1, step.query_count - first_query)
