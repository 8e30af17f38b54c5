"""The selections of a layer group, step by step: drawn by the generator, or read from a trace.

A row id is place * context + position, where requests of a trace that live at the same time have
different places, so that all share one pool, as in the engine. In every step the positions of its
query tokens are written first; then the queries select. A request that no later step names has
ended: its rows leave the pools and its place is free for the next.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.pool.warmup import WINDOW_MAX
from ess.sim.locality.selections import Floats, Ints, LayerProfile, LayerStream, RequestLoad
from ess.trace import RequestStep, TraceHeader, TraceReader, TraceStep, TraceWriter

ROWS_MAX: Final = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Selected rows [queries, top_k] with -1 pads, and the new rows that the step writes.

    `scores` covers all rows, or is None where they were not recorded. For each query of a scored
    trace, `seen` has the rows that it could select and their scores as bytes. `ended` are ranges of
    rows whose request ends with this step.
    """

    rows: Ints
    fresh: Ints
    scores: Floats | None = None
    seen: tuple[tuple[Ints, npt.NDArray[np.uint8]], ...] | None = None
    ended: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """One layer group of one trace. `steps()` starts again at every call.

    `windows` are selections from just before the first step, oldest first.
    """

    name: str
    row_count: int
    query_count_max: int
    step_count: int
    windows: Ints
    steps: Callable[[], Iterator[Step]] = field(repr=False)


def distinct(rows: npt.NDArray[Any]) -> Ints:
    """The rows that some query selected, ascending and distinct."""
    present: Ints = np.unique(rows[rows >= 0]).astype(np.int32)
    return present


def generated(
    load: RequestLoad, profile: LayerProfile, *, layer: int = 0, window_count: int = WINDOW_MAX
) -> Workload:
    """A request of the generator; every `steps()` draws the same again."""

    def steps() -> Iterator[Step]:
        stream = LayerStream(load, profile, layer=layer)
        stream.windows(window_count)
        for drawn in stream:
            fresh = np.arange(drawn.length, drawn.length + load.query_count, dtype=np.int32)
            yield Step(rows=drawn.selection, fresh=fresh, scores=drawn.scores)

    return Workload(
        name=f"generated layer {layer}",
        row_count=load.context_end,
        query_count_max=load.query_count,
        step_count=load.step_count,
        windows=LayerStream(load, profile, layer=layer).windows(window_count),
        steps=steps,
    )


def recorded(reader: TraceReader, *, group: int = 0, lead_steps: int = 0) -> Workload:
    """One layer group of a recorded trace.

    The first `lead_steps` are not replayed: their last 32 queries stand in for prefill's windows.
    """
    if not 0 <= lead_steps < len(reader):
        raise BadInput(
            f"lead_steps {lead_steps} of a trace with {len(reader)} steps leave none to count"
        )
    requests = [step.requests for step in reader]
    context = reader.header.context
    last_step = {entry.request: number for number, step in enumerate(requests) for entry in step}
    places = _places(requests, last_step)
    row_count = (1 + max(places.values(), default=0)) * context
    if row_count > ROWS_MAX:
        raise BadInput(
            f"{row_count // context} requests at once x context {context} make {row_count} rows, "
            f"at most {ROWS_MAX} can be simulated; cut the trace"
        )

    def replay(place: int) -> Step:
        step = reader.step(place)
        base = {entry.request: places[entry.request] * context for entry in step.requests}
        selection = step.selection(group)
        offset = np.repeat(
            np.array([base[entry.request] for entry in step.requests], np.int32),
            [entry.query_count for entry in step.requests],
        )
        return Step(
            rows=np.where(selection < 0, np.int32(-1), selection + offset[:, None]),
            fresh=_fresh_rows(step.requests, base),
            seen=_seen(step, group, base) if step.header.scored else None,
            ended=tuple(
                (base[entry.request], base[entry.request] + context)
                for entry in step.requests
                if last_step[entry.request] == place
            ),
        )

    lead = [replay(place).rows for place in range(lead_steps)]
    return Workload(
        name=f"recorded group {group}",
        row_count=row_count,
        query_count_max=max(1, max(sum(entry.query_count for entry in step) for step in requests)),
        step_count=len(reader) - lead_steps,
        windows=np.concatenate(lead)[-WINDOW_MAX:] if lead else np.empty((0, 1), np.int32),
        steps=lambda: (replay(place) for place in range(lead_steps, len(reader))),
    )


def write_trace(
    path: str | os.PathLike[str],
    load: RequestLoad,
    profiles: Sequence[LayerProfile],
    *,
    layout: str,
) -> TraceHeader:
    """A generated request as a trace file, one layer group per profile, all queries accepted."""
    header = TraceHeader(
        layout=layout,
        group_count=len(profiles),
        top_k=load.top_k,
        mtp=load.query_count,
        context=load.context_end,
        metadata={
            "generator": "ess.sim.locality.selections",
            "seed": load.seed,
            "kinship": load.kinship,
        },
    )
    streams = [LayerStream(load, profile, layer=i) for i, profile in enumerate(profiles)]
    with TraceWriter(path, header=header) as writer:
        for number in range(load.step_count):
            length = load.context + number * load.query_count
            for group, stream in enumerate(streams):
                writer.write_group(group, stream.step().selection)
            accepted = load.query_count
            entry = RequestStep(request=0, length=length, query_count=accepted, accepted=accepted)
            writer.commit_step(number, [entry])
    return header


def _places(requests: Sequence[Sequence[RequestStep]], last_step: dict[int, int]) -> dict[int, int]:
    """The place of each request: the lowest that is free when it begins; its end frees it."""
    places: dict[int, int] = {}
    free: list[int] = []
    for number, step in enumerate(requests):
        for entry in step:
            if entry.request not in places:
                new = heapq.heappop(free) if free else 1 + max(places.values(), default=-1)
                places[entry.request] = new
        for entry in step:
            if last_step[entry.request] == number:
                heapq.heappush(free, places[entry.request])
    return places


def _seen(
    step: TraceStep, group: int, base: dict[int, int]
) -> tuple[tuple[Ints, npt.NDArray[np.uint8]], ...]:
    """Query n of a request sees all rows from before the step, and n + 1 rows of its own."""
    counts = [
        (base[entry.request], entry.length + n + 1)
        for entry in step.requests
        for n in range(entry.query_count)
    ]
    scores = step.scores(group)
    return tuple(
        (np.arange(first, first + count, dtype=np.int32), mine[:count])
        for (first, count), mine in zip(counts, scores, strict=True)
    )


def _fresh_rows(requests: Sequence[RequestStep], base: dict[int, int]) -> Ints:
    written = [
        base[entry.request] + np.arange(entry.length, entry.length + entry.query_count)
        for entry in requests
    ]
    return np.concatenate(written).astype(np.int32) if written else np.empty(0, np.int32)
