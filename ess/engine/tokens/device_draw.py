"""`draw` on a device, where the host reads no number: one kind of step for every batch.

The sampling parameters of a query lie in columns at fixed addresses, which are filled again when
the batch changes. A kernel cuts rows to what top-k, top-p and min-p leave, and another draws from
them; `draw` sorts as far as it must and checks whether that was enough. Rows without such limits
pass through the first kernel as they are. A greedy request's token is the best, and both kernels
leave its rows out. So one rehearsed graph serves all batches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.engine.step.underway.uploads import Upload
from ess.engine.tokens.draw import NOT_A_NUMBER, wrapped_seed
from ess.engine.tokens.sampling import Sampling
from ess.kernels.calls import Cuts, Draws
from ess.kernels.cut import cut, draw

UNCUT: Final = (1 << 31) - 1
"""More tokens than a vocabulary has."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A line per query: (seed, top-k) int64 and (temperature, top-p, min-p) float32. Greedy
    queries have a top-k of 0."""

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
        is_same = len(given) == len(self._given) and all(map(operator.is_, given, self._given))
        if self._made is None or not is_same:
            self._given, self._made = given, self._fresh(given)
        return self._made

    def _fresh(self, given: list[Sampling]) -> Columns:
        whole, parts = zip(*map(_line, given), strict=True)
        return Columns(self._whole.put(whole), self._parts.put(parts))


def _line(given: Sampling) -> tuple[tuple[int, int], tuple[float, float, float]]:
    if given.is_greedy:
        return (0, 0), (1.0, math.inf, 0.0)
    top_p = given.top_p if given.top_p < 1.0 else math.inf
    whole = wrapped_seed(given.seed), given.top_k or UNCUT
    return whole, (given.temperature, top_p, given.min_p)


def draw_all(logits: Tensor, by: Columns, positions: Tensor) -> Tensor:
    """Ids int64 [queries]; `NOT_A_NUMBER` where the logits are none."""
    drawn = logits.argmax(-1)
    seeds, top_k = by.whole.T.contiguous()
    temperature, *limits = by.parts.T.contiguous()
    scores = cut(logits / temperature[:, None], Cuts(top_k, *limits))
    draw(scores, Draws(top_k, seeds, positions), drawn)
    is_none = logits.gather(-1, drawn[:, None])[:, 0].isnan()
    return drawn.masked_fill(is_none, NOT_A_NUMBER)
