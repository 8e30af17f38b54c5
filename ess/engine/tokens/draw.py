"""Tokens from logits: reproducible from the request's seed, whatever the batch or the drafts.

A token is the argmax of its logits plus Gumbel noise that depends on (seed, position, token id)
alone. That makes a draw of the softmax, and it makes verification trivial: the target token of a
position is drawn from that position's own noise, and a draft is accepted when it is equal. So the
output never depends on what was drafted, on the batch, or on how often a step was repeated.

Filters need an order: value descending, id ascending. Sorting a whole vocabulary costs more than
everything else, so a row is sorted as far as its filters reach. `topk` cuts ties at its reach as it
likes, therefore a row is settled only when its last kept value lies above the last value reached;
the others try again with a longer reach. The order, and the sums taken along it, are the same for
every reach, so what a row gives does not depend on its neighbours: bitwise, since every reduction
here runs along one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.engine.tokens.sampling import GREEDY_BELOW, Sampling
from ess.kernels.cpu import native, step
from ess.kernels.reference.noise import gumbel, mixed_keys

REACH_MIN: Final = 256
REACH_GROWTH: Final = 4
REACH_SHARE: Final = 4
AT_ONCE: Final = 1 << 17
NOT_A_NUMBER: Final = -1


def draw(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Ids int64 [queries] at `positions`, from logits float32 [queries, vocabulary], which stay;
    `NOT_A_NUMBER` where logits are NaN."""
    assert len(logits) == len(samplings) == len(positions), "a sampling and a position per query"
    warm = [query for query, by in enumerate(samplings) if by.temperature >= GREEDY_BELOW]
    if not warm and logits.is_cpu and native.available():
        return step.best(logits)
    drawn = logits.argmax(-1)
    cut = [query for query in warm if is_cut(samplings[query])]
    whole = [query for query in warm if not is_cut(samplings[query])]
    assert len(cut) + len(whole) == len(warm), "a query is drawn twice or never"
    for queries, draw_rows in ((whole, draw_whole), (cut, _draw_cut)):
        for piece in _pieces(queries, logits):
            given = [samplings[query] for query in piece]
            rows = _rows(logits[piece], given, [positions[query] for query in piece])
            drawn[piece] = draw_rows(rows)
    is_none = logits.gather(-1, drawn[:, None])[:, 0].isnan()
    return drawn.masked_fill_(is_none, NOT_A_NUMBER)


@dataclass(frozen=True, slots=True)
class Rows:
    """Logits over temperature [rows, vocabulary], and the sampling parameters of each row."""

    scores: Tensor
    keys: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    has_floor: bool

    def at(self, rows: Tensor) -> Rows:
        return Rows(
            self.scores[rows],
            self.keys[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.has_floor,
        )


def _rows(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Rows:
    """The logits are changed."""

    def column(value: Callable[[Sampling], float]) -> Tensor:
        return torch.tensor([value(sampling) for sampling in samplings], device=logits.device)

    return Rows(
        scores=logits.div_(column(lambda sampling: sampling.temperature)[:, None]),
        keys=noise_keys([sampling.seed for sampling in samplings], positions).to(logits.device),
        top_k=column(lambda sampling: min(sampling.top_k or logits.shape[1], logits.shape[1])),
        top_p=column(lambda sampling: sampling.top_p if sampling.top_p < 1.0 else math.inf),
        min_p=column(lambda sampling: sampling.min_p),
        has_floor=any(sampling.min_p for sampling in samplings),
    )


def is_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0


def _pieces(queries: list[int], logits: Tensor) -> Iterator[list[int]]:
    """On a CPU, rows that stay in its caches from one operation to the next."""
    count = max(1, AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return (queries[at : at + count] for at in range(0, len(queries), count))


def draw_whole(rows: Rows) -> Tensor:
    """Every token is a candidate, except those below min-p of the best."""
    noisy = gumbel(rows.keys, torch.arange(rows.scores.shape[1], device=rows.scores.device))
    noisy += rows.scores
    if rows.has_floor:
        floor = rows.scores.amax(-1) + rows.min_p.log()
        noisy.masked_fill_(rows.scores < floor[:, None], -torch.inf)
    return noisy.argmax(-1)


def _draw_cut(rows: Rows) -> Tensor:
    cut = rows.top_k[rows.top_k < rows.scores.shape[1]]
    reach = max(REACH_MIN, 2 * int(cut.max()) if len(cut) else 0)
    return _draw_within(rows, rows.scores.softmax(-1), reach)


def _draw_within(rows: Rows, chances: Tensor, reach: int) -> Tensor:
    vocabulary = rows.scores.shape[1]
    reach = reach if reach * REACH_SHARE < vocabulary else vocabulary
    assert len(rows.scores) > 0, "no rows to draw from"
    tokens, is_settled = draw_reached(rows, chances, reach)
    left = torch.nonzero(~is_settled)[:, 0]
    assert reach < vocabulary or len(left) == 0, "a whole row settles everything"
    if len(left):
        tokens[left] = _draw_within(rows.at(left), chances[left], reach * REACH_GROWTH)
    return tokens


def draw_reached(rows: Rows, chances: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Tokens drawn among the `reach` best of each row, and which rows that settles."""
    scores, ids = best(rows.scores, reach)
    kept = _kept(rows, scores, chances.gather(-1, ids))
    assert ids.shape == (len(rows.scores), reach), f"{tuple(ids.shape)} ids for a reach of {reach}"
    noisy = (scores + gumbel(rows.keys, ids)).masked_fill_(~kept, -torch.inf)
    tokens = ids.gather(-1, noisy.argmax(-1, keepdim=True))[:, 0]
    last_kept = scores.gather(-1, kept.sum(-1, keepdim=True) - 1)[:, 0]
    return tokens, (last_kept > scores[:, -1]) | (reach == rows.scores.shape[1])


def best(scores: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """The best scores of each row and their ids: descending, and by id where scores are equal."""
    assert 0 < reach <= scores.shape[1], f"a reach of {reach} in {scores.shape[1]} scores"
    if reach < scores.shape[1]:
        reached = scores.topk(reach, sorted=False).indices.sort(-1).values
        order = scores.gather(-1, reached).sort(dim=-1, descending=True, stable=True)
        return order.values, reached.gather(-1, order.indices)
    whole = scores.sort(dim=-1, descending=True, stable=True)
    return whole.values, whole.indices


def _kept(rows: Rows, scores: Tensor, chances: Tensor) -> Tensor:
    """Which of the best survive top-k, top-p and min-p: always a first part, however sums are
    rounded."""
    rank = torch.arange(scores.shape[1], device=scores.device)
    kept = (rank < rows.top_k[:, None]) & (scores > -torch.inf)
    summed = chances.cumsum(-1)
    last = (rows.top_k.clamp_max(scores.shape[1]) - 1)[:, None]
    is_cut = rows.top_k[:, None] < rows.scores.shape[1]
    share = torch.where(is_cut, summed.gather(-1, last), 1.0)
    kept &= summed - chances < rows.top_p[:, None] * share
    kept &= chances >= rows.min_p[:, None] * chances[:, :1]
    kept[:, 0] = True
    return (~kept).cumsum(-1) == 0


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """int32 [rows, 2]: other keys for another seed or another position."""
    assert len(seeds) == len(positions), f"{len(positions)} positions for {len(seeds)} seeds"
    wrapped = torch.tensor([wrapped_seed(seed) for seed in seeds], dtype=torch.int64)
    return mixed_keys(wrapped, torch.as_tensor(positions, dtype=torch.int64))


def wrapped_seed(seed: int) -> int:
    """The seed's 64 bits as a number with a sign."""
    return (seed & ((1 << 64) - 1)) - ((seed & (1 << 63)) << 1)
