"""Selections on real text, recorded as a trace: the rows that each next token selects.

The model reads the text, whatever it would say itself. So the selections are those of prefill, 32
queries at a time, which an offload gets as windows when a prompt's last chunk is done. Decode would
make the same ones behind the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ess.bench.engine.arms.around import WrappedPlacement
from ess.bench.engine.arms.decode_arm import lay_in
from ess.bench.harness.prefix import Prefix, offload_of_one
from ess.door import Sequence as Served
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.kernels.calls import Backend, IndexQueries
from ess.kernels.ops import Ops
from ess.pool.lru.eviction import scored
from ess.pool.warmup import WINDOW_MAX
from ess.trace import RequestStep, TraceHeader, TraceWriter
from ess.units import PAGE_ROWS, div_ceil

Windows = npt.NDArray[np.int32]
Scores = npt.NDArray[np.uint8]


class Windowed(WrappedPlacement):
    """Keeps the windows of the last prompt."""

    windows: Windows

    def warm(self, sequence: Served, windows: Windows) -> None:
        self.windows = windows.copy()


def record(
    path: Path,
    prefix: Prefix,
    ids: list[int],
    *,
    query_count: int,
    mtp: int,
    groups: Sequence[int] | None = None,
) -> None:
    """Records the selections of `query_count` words that follow the prefix, `mtp` to a step.

    `prefix` must be laid out from `ids`, so that what follows in `ids` follows in the text. Records
    all layer groups, or those given.
    """
    kept = range(prefix.layout.group_count) if groups is None else groups
    if query_count % WINDOW_MAX or WINDOW_MAX % mtp:
        raise BadInput(f"{query_count} queries, {mtp} a step: take multiples of {WINDOW_MAX}")
    start = prefix.length
    if len(ids) <= start + query_count:
        raise BadInput(f"the text has {len(ids)} tokens, {start + query_count + 1} are read")
    header = TraceHeader(
        layout=prefix.layout.name,
        group_count=len(kept),
        top_k=prefix.layout.top_k,
        mtp=mtp,
        context=start + query_count,
        metadata={"text": prefix.text, "context": prefix.shortcut},
        scored=True,
    )
    with TraceWriter(path, header=header) as writer:
        for number, (windows, scores) in enumerate(_windows(prefix, ids, query_count)):
            made = windows[list(kept)], [scores[group] for group in kept]
            _write(writer, number * WINDOW_MAX, start, made, mtp)


class Scoring:
    """A `Backend` that keeps, per layer group, the scores by which the last queries of a prompt
    selected."""

    def __init__(self, ops: Ops) -> None:
        self.heard: list[Scores] = []
        self._ops, self._real = ops, ops.backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def index_top_k(self, call: IndexQueries, out: Tensor) -> None:
        queries, weights, pages, table, lengths, codec, threads, _ = call
        logits = self._ops.index_logits(
            queries, weights, pages, table, lengths, codec, threads=threads
        )
        self._real.top_k(logits, lengths, out, threads)
        last = (each[-WINDOW_MAX:].numpy() for each in (logits, out, lengths))
        self.heard.append(_quantised(*last))


def _quantised(logits: Any, chosen: Windows, lengths: Any) -> Scores:
    scores = np.zeros(logits.shape, np.uint8)
    for query, count in enumerate(lengths.tolist()):
        scores[query, :count] = scored(logits[query, :count], chosen[query])
    return scores


def _windows(
    prefix: Prefix, ids: list[int], query_count: int
) -> list[tuple[Windows, list[Scores]]]:
    """Runs prompts, each 32 words longer than the one before, which is its cached prefix."""
    layout, start = prefix.layout, prefix.length
    pages = div_ceil(start + query_count + WINDOW_MAX, PAGE_ROWS) + 4
    recorded = []
    kept = Windowed()
    with offload_of_one(layout, pages, is_resident=False, placement=kept.over) as offload:
        engine = Engine(prefix.model, offload, EngineConfig(mtp=1))
        scoring = Scoring(engine.runner.ops)
        engine.runner.ops = Ops(engine.runner.ops.name, cast(Backend, scoring))
        lay_in(offload, prefix, [ids[: start + 1]])
        for stop in range(start + WINDOW_MAX, start + query_count + 1, WINDOW_MAX):
            scoring.heard.clear()
            request = engine.add(ids[: stop + 1], Sampling(tokens_max=1))
            while request.state in ("waiting", "prefilling"):
                engine.step()
            engine.cancel(request)
            offload.drain()
            recorded.append((kept.windows, scoring.heard[-layout.group_count :]))
    return recorded


def _write(
    writer: TraceWriter, first: int, start: int, made: tuple[Windows, list[Scores]], mtp: int
) -> None:
    for at in range(0, WINDOW_MAX, mtp):
        for group, (selections, scores) in enumerate(zip(*made, strict=True)):
            step = slice(at, at + mtp)
            width = min(scores.shape[1], writer.header.context)
            writer.write_group(group, selections[step], scores=scores[step, :width])
        length = start + first + at
        request_step = RequestStep(request=0, length=length, query_count=mtp, accepted=mtp)
        writer.commit_step((first + at) // mtp, [request_step])
