"""What one layer of a decode step attends and misses, drawn from the calibrated selections.

A few requests are drawn and simulated to their steady state under exact LRU; a batch repeats them
at places of its own. Slots and host rows are laid out request by request. Host rows wrap around at
a bound, so that a batch of long contexts needs no hundred gigabytes: the copies stay as scattered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.sim.locality.selections import LayerProfile, LayerStream, RequestLoad
from ess.units import div_ceil

Ints = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

TOP_K: Final = 2048
WARM_STEPS: Final = 30
DRAWN_REQUESTS: Final = 4
HOST_ROWS_MAX: Final = 4 << 20
BATCHES: Final = (160, 64, 40, 16, 1)
QUERIES: Final = (1, 2, 4)
CONTEXTS: Final = (32 << 10, 128 << 10)
SMOKE_CONTEXT: Final = 4 << 10
SLOT_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement: requests, tokens that each verifies, positions of each, slots."""

    batch: int
    queries: int
    context: int
    slots: int

    def __post_init__(self) -> None:
        if min(self.batch, self.queries, self.context) < 1 or self.slots < TOP_K * self.queries:
            raise BadInput(f"{self}: a request needs slots for {TOP_K} rows of every query")

    @property
    def query_count(self) -> int:
        return self.batch * self.queries

    @property
    def config(self) -> dict[str, int]:
        return {
            "batch": self.batch,
            "mtp": self.queries,
            "context": self.context,
            "slots": self.slots,
        }


def points(*, smoke: bool) -> Iterator[Point]:
    """A fifth of the context in slots, but at least what the queries of a step can name."""
    for context in (SMOKE_CONTEXT,) if smoke else CONTEXTS:
        for queries in QUERIES[: 1 if smoke else None]:
            for batch in BATCHES[-1 if smoke else None :]:
                slots = max(round(SLOT_SHARE * context), TOP_K * queries + 64)
                yield Point(batch=batch, queries=queries, context=context, slots=slots)


class Step(NamedTuple):
    """One request's step: the slot of every selected position [queries, k], which of them are
    missing, and the missing positions with the slots they go to, each once."""

    slots: Ints
    missing: Flags
    fetched_positions: Ints
    fetched_slots: Ints


class Residency:
    """Exact LRU over the positions of one request; what a step selects is never a victim."""

    def __init__(self, *, context: int, slots: int) -> None:
        self._slot_of = np.full(context, -1, np.int32)
        self._position_of = np.full(slots, -1, np.int32)
        self._last_use = np.full(slots, -1, np.int64)
        self._step = 0

    def step(self, selection: Ints) -> Step:
        self._step += 1
        wanted = np.unique(selection[selection >= 0])
        absent = self._slot_of[wanted] < 0
        missing = (selection >= 0) & (self._slot_of[selection] < 0)
        self._last_use[self._slot_of[wanted[~absent]]] = self._step
        victims = self._oldest(int(absent.sum()))
        given_up = self._position_of[victims]
        self._slot_of[given_up[given_up >= 0]] = -1
        self._position_of[victims], self._last_use[victims] = wanted[absent], self._step
        self._slot_of[wanted[absent]] = victims
        slots = np.where(selection >= 0, self._slot_of[selection], -1).astype(np.int32)
        return Step(slots, missing, wanted[absent].astype(np.int32), victims)

    def _oldest(self, count: int) -> Ints:
        order = np.argsort(self._last_use, kind="stable")[:count].astype(np.int32)
        assert (self._last_use[order] < self._step).all(), "a selected row would give way"
        return order


def draw(point: Point, *, seed: int = 0, profile: LayerProfile | None = None) -> list[Step]:
    """The last step of a few requests, after their residency has settled."""
    drawn = []
    for request in range(min(DRAWN_REQUESTS, point.batch)):
        load = RequestLoad(
            context=point.context,
            step_count=WARM_STEPS,
            query_count=point.queries,
            top_k=TOP_K,
            seed=seed * DRAWN_REQUESTS + request,
        )
        stream = LayerStream(load, profile or LayerProfile(), layer=0)
        residency = Residency(context=load.context_end, slots=point.slots)
        for window in stream.windows(WARM_STEPS):
            last = residency.step(window[None])
        for selected in stream:
            last = residency.step(selected.selection)
        drawn.append(last)
    return drawn


class Batch(NamedTuple):
    """A whole batch in one slab: what each query attends, and what is copied from where to where.

    `resident` and `fetched` are `whole` with -1 where the other has the slot.
    """

    whole: Ints
    resident: Ints
    fetched: Ints
    host_rows: Ints
    target_slots: Ints
    fetch_starts: Ints

    def fetch_of(self, requests: range) -> slice:
        """The copies of these requests."""
        return slice(int(self.fetch_starts[requests.start]), int(self.fetch_starts[requests.stop]))

    @property
    def misses_mean(self) -> float:
        return len(self.host_rows) / (len(self.fetch_starts) - 1)


def lay_out(point: Point, steps: list[Step], *, host_row_count: int) -> Batch:
    whole, missing, host_rows, targets, starts = [], [], [], [], [0]
    for request in range(point.batch):
        step, base = steps[request % len(steps)], request * point.slots
        whole.append(np.where(step.slots >= 0, step.slots + base, -1))
        missing.append(step.missing)
        first = request * point.context
        host_rows.append((first + step.fetched_positions.astype(np.int64)) % host_row_count)
        targets.append(step.fetched_slots + base)
        starts.append(starts[-1] + len(step.fetched_slots))
    slots, absent = np.concatenate(whole).astype(np.int32), np.concatenate(missing)
    return Batch(
        whole=slots,
        resident=np.where(absent, -1, slots).astype(np.int32),
        fetched=np.where(absent, slots, -1).astype(np.int32),
        host_rows=np.concatenate(host_rows).astype(np.int32),
        target_slots=np.concatenate(targets).astype(np.int32),
        fetch_starts=np.array(starts, np.int32),
    )


def halves(batch: int, count: int) -> list[range]:
    """The requests in at most `count` parts, none empty, larger ones first."""
    parts = min(count, batch)
    ends = [div_ceil(batch * part, parts) for part in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]
