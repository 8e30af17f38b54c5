"""From measured times of chunks to pipelines that were not run: other sizes, other partitions.

The time of every layer is known for some chunks. The sum of all layers is fitted,

    quadratic c (c + 2 h) + linear c + a constant     for c tokens behind h others,

and each layer has its share of that; a stage has the sum of its layers' shares. If times do not
grow with depth, or too few chunks were run to show it, the first term is close to 0.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.engine.chunking.partition import Costs
from ess.engine.chunking.sizes import PrefillTime
from ess.errors import BadInput
from ess.sim.prefill.pipeline import Pipeline

FLAT: Final = 1e-15
"""Seconds per token squared where the fit has none: a PrefillTime must have some."""
CHOICES: Final = ((1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2))
PASSES: Final = 4
LEAST_ERROR: Final = 0.005
LEAST_GAIN: Final = 1e-3
RANK_LIMIT: Final = 1e-9
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredChunk:
    """A chunk of `count` tokens behind `done`: seconds of each layer, those of MTP last."""

    done: int
    count: int
    layer_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return math.fsum(self.layer_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`overhead_s` is the constant, for all layers together; `error` the median deviation of the
    fitted chunks, as a share."""

    time: PrefillTime
    overhead_s: float
    shares: tuple[float, ...]
    error: float
    is_flat: bool

    def seconds(self, done: int, count: int) -> float:
        """Seconds of all layers."""
        return self.time.of(count, after=done) + self.overhead_s

    def stage_s(self, layers: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[list[float]]:
        """Seconds by chunk and stage, the form that `clocked` takes."""
        shares = self.stage_shares(layers)
        starts = itertools.accumulate(sizes, initial=0)
        totals = [self.seconds(done, size) for done, size in zip(starts, sizes, strict=False)]
        return [[total * share for share in shares] for total in totals]

    def stage_shares(self, layers: Sequence[tuple[int, int]]) -> tuple[float, ...]:
        """The share of each stage; the last also has MTP."""
        ends = [*(stop for _, stop in layers[:-1]), len(self.shares)]
        sums = [
            math.fsum(self.shares[first:end]) for (first, _), end in zip(layers, ends, strict=True)
        ]
        return tuple(part / math.fsum(sums) for part in sums)

    def pipeline(self, layers: Sequence[tuple[int, int]]) -> Pipeline:
        return Pipeline(
            shares=self.stage_shares(layers), chunk_overhead_s=self.overhead_s / len(layers)
        )

    def costs(self, layer_count: int) -> Costs:
        return Costs(layers=self.shares[:layer_count], mtp=math.fsum(self.shares[layer_count:]))


def modelled(chunks: Sequence[MeasuredChunk]) -> Model:
    if not chunks or len({len(chunk.layer_s) for chunk in chunks}) != 1:
        raise BadInput(f"{len(chunks)} chunks: all must be of the same layers, at least one")
    if not all(chunk.count > 0 and chunk.seconds > 0 for chunk in chunks):
        raise BadInput("a chunk without tokens, or one that took no time")
    time, overhead_s, is_flat = _fitted(chunks)
    total = math.fsum(chunk.seconds for chunk in chunks)
    layers = zip(*(chunk.layer_s for chunk in chunks), strict=True)
    off = [
        abs((time.of(chunk.count, after=chunk.done) + overhead_s) / chunk.seconds - 1)
        for chunk in chunks
    ]
    return Model(
        time=time,
        overhead_s=overhead_s,
        shares=tuple(math.fsum(seconds) / total for seconds in layers),
        error=statistics.median(off),
        is_flat=is_flat,
    )


def _fitted(chunks: Sequence[MeasuredChunk]) -> tuple[PrefillTime, float, bool]:
    """Least squares of relative errors, with no term below 0. Chunks far from the fit count less: a
    busy machine makes some of them slow."""
    sizes = [(chunk.done, chunk.count) for chunk in chunks]
    columns = np.array([(c * (c + 2.0 * h), c, 1.0) for h, c in sizes])
    seconds = np.array([chunk.seconds for chunk in chunks])
    weights = 1 / seconds
    terms = _non_negative(columns, seconds, weights)
    for _ in range(PASSES):
        off = np.abs(columns @ terms / seconds - 1)
        middle = max(float(np.median(off)), LEAST_ERROR)
        terms = _non_negative(columns, seconds, weights * np.sqrt(middle / np.maximum(off, middle)))
    quadratic, linear, overhead_s = map(float, terms)
    is_flat = quadratic <= FLAT
    return PrefillTime(quadratic=max(quadratic, FLAT), linear=linear), overhead_s, is_flat


def _non_negative(columns: Floats, seconds: Floats, weights: Floats) -> Floats:
    """The best fit, over all choices of terms with the others 0, whose terms are all above 0."""
    scale = np.linalg.norm(columns * weights[:, None], axis=0)
    heavy, wanted = columns * weights[:, None] / scale, seconds * weights
    best, best_off = np.zeros(3), math.inf
    for chosen in CHOICES:
        part = list(chosen)
        terms, *_ = np.linalg.lstsq(heavy[:, part], wanted, rcond=RANK_LIMIT)
        off = float(np.linalg.norm(heavy[:, part] @ terms - wanted))
        if min(terms) > 0 and off < best_off * (1 - LEAST_GAIN):
            best, best_off = np.zeros(3), off
            best[part] = terms / scale[part]
    return best
