"""How likely the model thought its tokens: log probabilities for people.

All of them are of the model's own distribution: the log-softmax of the raw logits, before bias,
penalties, grammar, temperature and filters. So they do not depend on how a token was drawn, and a
token that a filter would never have let through still has its true chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ess.engine.tokens.chance import Chance
from ess.engine.tokens.draw import best

REACH_MORE: Final = 8


def chances(logits: Tensor, tokens: Sequence[int], top_count: int) -> tuple[Chance, ...]:
    """The chances of `tokens`, each by its own row of logits float32 [tokens, vocabulary]."""
    assert len(logits) == len(tokens), f"{len(tokens)} tokens of {len(logits)} rows"
    scores = logits.log_softmax(-1)
    chosen = torch.tensor(list(tokens), device=logits.device)[:, None]
    ranks = 1 + (logits > logits.gather(-1, chosen)).sum(-1)
    values = scores.gather(-1, chosen)[:, 0]
    tops = _tops(logits, scores, top_count)
    return tuple(map(Chance, values.tolist(), ranks.tolist(), tops))


def chance_block(logits: Tensor, tokens: Tensor, top_count: int) -> Tensor:
    """The same where the numbers must stay on their device: float64 [tokens, 2 + 2 * top_count],
    of each its logprob and rank, the ids of the likeliest and their logprobs. A line is sorted
    whole, so nothing has to be looked at on the way."""
    scores = logits.log_softmax(-1)
    chosen = tokens[:, None].clamp_min(0)
    ranks = 1 + (logits > logits.gather(-1, chosen)).sum(-1, keepdim=True)
    parts = [scores.gather(-1, chosen).double(), ranks.double()]
    if top_count:
        ids = best(logits, logits.shape[1])[1][:, :top_count]
        parts += [ids.double(), scores.gather(-1, ids).double()]
    return torch.cat(parts, dim=1)


def block_chances(block: Sequence[Sequence[float]]) -> tuple[Chance, ...]:
    """The values of `chance_block`, on the host."""
    chances = []
    for logprob, rank, *rest in block:
        count = len(rest) // 2
        ids = map(int, rest[:count])
        chances.append(Chance(logprob, int(rank), tuple(zip(ids, rest[count:], strict=True))))
    return tuple(chances)


def _tops(logits: Tensor, scores: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The `count` likeliest tokens of each row. Where the last value reached equals the last value
    listed, an equal logit of a lower id may lie beyond the reach: such a row is sorted whole.
    """
    assert len(logits) == len(scores), f"{len(scores)} rows of scores, {len(logits)} of logits"
    if count == 0:
        return [()] * len(logits)
    vocabulary = logits.shape[1]
    reach = min(vocabulary, 2 * count + REACH_MORE)
    count = min(count, vocabulary)
    values, ids = best(logits, reach)
    for row in torch.nonzero(values[:, count - 1] == values[:, -1])[:, 0].tolist():
        ids[row] = best(logits[row : row + 1], vocabulary)[1][0, :reach]
    ids = ids[:, :count]
    pairs = zip(ids.tolist(), scores.gather(-1, ids).tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]
