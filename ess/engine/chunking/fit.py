"""Least squares for what chunks take: quadratic c (c + 2 h) + linear c + constant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.engine.chunking.sizes import PrefillTime

Sample = tuple[int, int, float]
"""Tokens before, tokens of the chunk, seconds."""
Floats = npt.NDArray[np.float64]

FAR: Final = 4.0
PASSES: Final = 4
BEND: Final = 1.5
RANK_LIMIT: Final = 1e-6
SPREAD: Final = 1.4826  # from the median of distances to a standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFit:
    """`quadratic_error` is the standard error of the quadratic term."""

    quadratic: float
    linear: float
    quadratic_error: float

    def time(self) -> PrefillTime:
        """A linear term below 0 is noise: more tokens never take less time."""
        return PrefillTime(quadratic=self.quadratic, linear=max(self.linear, 0.0))


def fitted(samples: Sequence[Sample]) -> TimeFit | None:
    """Plain least squares; None where the samples do not tell the terms apart."""
    return _solved(_columns(samples), _seconds(samples), np.ones(len(samples)))


def fitted_robustly(samples: Sequence[Sample], expected: Sequence[float]) -> TimeFit | None:
    """A fit by relative errors against the `expected` time of each sample, in any unit. Samples far
    from the median are left out; samples far from the fit count less."""
    columns, seconds, scale = _columns(samples), _seconds(samples), np.array(expected)
    ratios = seconds / scale
    middle = np.median(ratios)
    near = (ratios > middle / FAR) & (ratios < middle * FAR)
    columns, seconds, scale = columns[near], seconds[near], scale[near] * middle
    weights = 1 / scale
    fit = None
    for _ in range(PASSES):
        fit = _solved(columns, seconds, weights)
        if fit is None:
            return None
        weights = _bent(columns, seconds, scale, weights)
    return fit


def _bent(columns: Floats, seconds: Floats, scale: Floats, weights: Floats) -> Floats:
    """Huber's weights: near the fit as for least squares, far from it as for least distances."""
    terms, _, _ = _least(columns, seconds, weights)
    off = np.abs(columns @ terms - seconds) / scale
    spread = SPREAD * float(np.median(off))
    if spread <= 0:
        return 1 / scale
    return np.sqrt(np.minimum(1, BEND * spread / np.maximum(off, 1e-12))) / scale


def _solved(columns: Floats, seconds: Floats, weights: Floats) -> TimeFit | None:
    """Chunks that are all of one length do not tell a constant from a linear term: then it has
    none."""
    for width in (3, 2):
        if len(seconds) <= width:
            continue
        terms, rank, covered = _least(columns[:, :width], seconds, weights)
        if rank == width:
            error = _error(columns[:, :width], seconds, weights, terms, covered)
            return TimeFit(quadratic=float(terms[0]), linear=float(terms[1]), quadratic_error=error)
    return None


def _least(columns: Floats, seconds: Floats, weights: Floats) -> tuple[Floats, int, Floats]:
    """Terms, how many of them the samples tell apart, and the scale of each column."""
    heavy = columns * weights[:, None]
    norms = np.linalg.norm(heavy, axis=0)
    terms, _, rank, _ = np.linalg.lstsq(heavy / norms, seconds * weights, rcond=RANK_LIMIT)
    return terms / norms, int(rank), norms


def _error(
    columns: Floats, seconds: Floats, weights: Floats, terms: Floats, norms: Floats
) -> float:
    heavy = columns * weights[:, None] / norms
    off = (columns @ terms - seconds) * weights
    variance = float(off @ off) / max(1, len(seconds) - len(terms))
    inverse = np.linalg.pinv(heavy.T @ heavy)
    return float(np.sqrt(variance * inverse[0, 0])) / float(norms[0])


def _columns(samples: Sequence[Sample]) -> Floats:
    return np.array([(c * (c + 2.0 * h), c, 1.0) for h, c, _ in samples])


def _seconds(samples: Sequence[Sample]) -> Floats:
    return np.array([seconds for _, _, seconds in samples])
