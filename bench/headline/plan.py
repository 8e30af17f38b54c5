"""The headline's plan, and the results that its two halves fill in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ess.bench.harness.report import Row
from ess.sim.planning.batches import Point
from ess.sim.timeline import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlineRun:
    """`predicted` are the contexts of the predicted half, by default those of the measured one;
    `node_bytes` is host memory of a node in it, by default what the GPU's node has."""

    contexts: Sequence[int]
    predicted: Sequence[int] = ()
    mtps: Sequence[int] = (2,)
    batches: Sequence[int] = (1,)
    ratios: Sequence[float] = (0.2,)
    mode: str = "layerwise"
    repetitions: int = 5
    steps: int = 8
    model: str = "deepseek-v3.2"
    gpu: str = "h200"
    gpus: int = 32
    node_bytes: int | None = None
    accepted: float | None = None
    seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """One GPU over its batches, with offload up to what its host memory holds, and without."""

    title: str
    points: list[Point]
    resident: list[Point]
    index_wall: int
    floor_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    rows: list[Row] = field(default_factory=list)
    timelines: list[tuple[str, list[Span]]] = field(default_factory=list)
    curves: list[Curves] = field(default_factory=list)
