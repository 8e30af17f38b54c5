"""`draw` on a device, where the host reads no number: rows are drawn in all ways and keep one.

The sampling parameters of a query lie in columns at fixed addresses, which are filled again when
the batch changes. A kernel cuts rows to what top-k, top-p and min-p leave; `draw` sorts as far as
it must and checks whether that was enough. Rows without such limits pass through the kernel as they
are. So one rehearsed graph serves all batches that draw. A batch of greedy requests has another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.engine.step.underway.uploads import Upload
from ess.engine.tokens.draw import (
    NOT_A_NUMBER,
    Rows,
    draw_whole,
    mixed_keys,
    wrapped_seed,
)
from ess.engine.tokens.sampling import Sampling
from ess.kernels.calls import Cuts
from ess.kernels.cut import cut

UNCUT: Final = (1 << 31) - 1
"""More tokens than a vocabulary has."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A line per query: (seed, top-k) int64 and (temperature, top-p, min-p) float32. Greedy ones
    have the temperature 0. `draws` is False where all are greedy."""

    draws: bool
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
        draws = not all(each.is_greedy for each in given)
        return Columns(draws, self._whole.put(whole), self._parts.put(parts))


def _is(first: object, second: object) -> bool:
    return first is second


def draw_all(logits: Tensor, by: Columns, positions: Tensor) -> Tensor:
    """Ids int64 [queries]; `NOT_A_NUMBER` where the logits are none."""
    drawn = logits.argmax(-1)
    if by.draws:
        is_warm = by.parts[:, 0] > 0
        drawn = torch.where(is_warm, draw_whole(_rows(logits, by, positions)), drawn)
    is_none = logits.gather(-1, drawn[:, None])[:, 0].isnan()
    return drawn.masked_fill(is_none, NOT_A_NUMBER)


def _rows(logits: Tensor, by: Columns, positions: Tensor) -> Rows:
    seeds, top_k = by.whole.unbind(1)
    temperature, top_p, min_p = by.parts.unbind(1)
    cuts = Cuts(top_k.clamp_max(logits.shape[1]), top_p, min_p)
    scores = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    keys = mixed_keys(seeds, positions)
    return Rows(cut(scores, cuts), keys, *cuts, has_floor=False)
