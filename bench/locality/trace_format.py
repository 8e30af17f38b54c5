"""The cost of a recorded selection on disk and in time, against raw int32 and zlib."""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.bench.harness.measure.timing import Arm, Samples, measure
from ess.bench.harness.report import Row, compare
from ess.trace import TraceHeader, selections

TOP_K: Final = 2048
CONTEXTS: Final = (32_768, 131_072, 1_048_576)

Selection = npt.NDArray[np.int32]


def trace_benchmark(*, smoke: bool) -> list[Row]:
    """Positions are drawn uniformly, which gives the widest gaps of a context."""
    rng = np.random.default_rng(7)
    repeats = 3 if smoke else 31
    rows: list[Row] = []
    for context in CONTEXTS[:1] if smoke else CONTEXTS:
        drawn = rng.choice(context, size=TOP_K, replace=False)
        rows += _one_context(np.sort(drawn).astype(np.int32)[None, :], context, repeats)
    return rows


def _one_context(selection: Selection, context: int, repeats: int) -> list[Row]:
    header = TraceHeader(layout="deepseek-v3.2", group_count=1, top_k=TOP_K, mtp=1, context=context)
    raw = selection.tobytes()
    ours, packed = selections.encode(0, selection), zlib.compress(raw)
    config: dict[str, Any] = {"context": context, "top_k": TOP_K, "positions": "uniform"}
    writing = measure(
        [
            Arm(name="varint", run=lambda: selections.encode(0, selection)),
            Arm(name="zlib", run=lambda: zlib.compress(raw)),
        ],
        repeats=repeats,
    )
    reading = measure(
        [
            Arm(
                name="varint",
                run=lambda: selections.decode(ours, group=0, query_count=1, header=header),
            ),
            Arm(name="zlib", run=lambda: np.frombuffer(zlib.decompress(packed), np.int32)),
        ],
        repeats=repeats,
        same_result=True,
    )
    return [
        _size_row("int32", ours, raw, config),
        _size_row("zlib of int32", ours, packed, config),
        _time_row("trace encode", writing, config),
        _time_row("trace decode", reading, config),
    ]


def _size_row(rival: str, ours: bytes, theirs: bytes, config: dict[str, Any]) -> Row:
    return compare(
        name="trace bytes per selection",
        unit="B",
        ours=[len(ours)],
        baseline=(rival, [len(theirs)]),
        config=config,
    )


def _time_row(name: str, samples: list[Samples], config: dict[str, Any]) -> Row:
    ours, rival = samples
    return compare(
        name=name,
        unit="us",
        ours=ours.each(scale=1e6),
        baseline=(rival.name, rival.each(scale=1e6)),
        config=config,
    )
