"""`draw` on a device, where the host reads no number: rows are drawn in all ways and keep one.

The sampling parameters of a query lie in columns at fixed addresses, which are filled again when
the batch changes. Ways that no request of the batch needs are left out. A kernel cuts rows to what
top-k, top-p and min-p leave; `draw` sorts as far as it must and checks whether that was enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ess.engine.step.underway.uploads import Upload
from ess.engine.tokens.draw import (
    NOT_A_NUMBER,
    Rows,
    draw_whole,
    is_cut,
    mixed_keys,
    wrapped_seed,
)
from ess.engine.tokens.sampling import Sampling
from ess.kernels.calls import Cuts
from ess.kernels.cut import cut

Kind = Literal["greedy", "whole", "cut"]
UNCUT: Final = (1 << 31) - 1
"""More tokens than a vocabulary has."""


class Ways(NamedTuple):
    """What the queries of a step need; each graph is captured for one such set."""

    kind: Kind
    has_floor: bool


@dataclass(frozen=True, slots=True)
class Columns:
    """A line per query: (seed, top-k) int64 and (temperature, top-p, min-p) float32. Greedy ones
    have the temperature 0."""

    ways: Ways
    whole: Tensor
    parts: Tensor


class Drawing:
    """Makes the columns of a step."""

    def __init__(self, query_max: int, device: torch.device) -> None:
        self._whole = Upload((query_max, 2), torch.int64, device)
        self._parts = Upload((query_max, 3), torch.float32, device)
        self._given: list[Sampling] = []
        self._made: Columns | None = None

    def columns(self, samplings: Sequence[Sampling]) -> Columns:
        """An entry for each query."""
        given = list(samplings)
        is_same = len(given) == len(self._given) and all(map(_is, given, self._given))
        if self._made is None or not is_same:
            self._given, self._made = given, self._fresh(given)
        return self._made

    def _fresh(self, given: list[Sampling]) -> Columns:
        whole = [(wrapped_seed(each.seed), each.top_k or UNCUT) for each in given]
        parts = [
            (
                0.0 if each.is_greedy else each.temperature,
                each.top_p if each.top_p < 1.0 else math.inf,
                each.min_p,
            )
            for each in given
        ]
        return Columns(ways_of(given), self._whole.put(whole), self._parts.put(parts))


def _is(first: object, second: object) -> bool:
    return first is second


def ways_of(samplings: Sequence[Sampling]) -> Ways:
    warm = [sampling for sampling in samplings if not sampling.is_greedy]
    kind: Kind = "cut" if any(map(is_cut, warm)) else "whole" if warm else "greedy"
    return Ways(kind, any(sampling.min_p for sampling in warm))


def draw_all(logits: Tensor, by: Columns, positions: Tensor) -> Tensor:
    """Ids int64 [queries]; `NOT_A_NUMBER` where the logits are none."""
    drawn = logits.argmax(-1)
    if by.ways.kind != "greedy":
        rows, is_warm = _rows(logits, by, positions)
        drawn = torch.where(is_warm, _drawn_warm(rows, by.ways.kind), drawn)
    is_none = logits.gather(-1, drawn[:, None])[:, 0].isnan()
    return drawn.masked_fill(is_none, NOT_A_NUMBER)


def _rows(logits: Tensor, by: Columns, positions: Tensor) -> tuple[Rows, Tensor]:
    seeds, top_k = by.whole.unbind(1)
    temperature, top_p, min_p = by.parts.unbind(1)
    is_warm = temperature > 0
    rows = Rows(
        scores=logits / torch.where(is_warm, temperature, 1.0)[:, None],
        keys=mixed_keys(seeds, positions),
        top_k=top_k.clamp_max(logits.shape[1]),
        top_p=top_p,
        min_p=min_p,
        has_floor=by.ways.has_floor,
    )
    return rows, is_warm


def _drawn_warm(rows: Rows, kind: Kind) -> Tensor:
    if kind == "cut":
        rows = replace(rows, scores=cut(rows.scores, Cuts(rows.top_k, rows.top_p, rows.min_p)))
    return draw_whole(rows)
