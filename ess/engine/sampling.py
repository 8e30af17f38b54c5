"""Which token comes next: reproducible from the request's seed, whatever the batch or the drafts.

A token is the argmax of its logits plus Gumbel noise that depends on (seed, position, token id)
alone. That makes a draw of the softmax, and it makes verification trivial: the target token of a
position is drawn from that position's own noise, and a draft is accepted when it is equal. So the
output never depends on what was drafted, on the batch, or on how often a step was repeated.

Filters (top-k, top-p, min-p) act on the distribution after penalties, bias and temperature, in this
order, and always leave the best token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from ess.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    tokens_max: int = 128
    tokens_min: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        _within("max_tokens", self.tokens_max, 1, 1 << 24)
        _within("min_tokens", self.tokens_min, 0, self.tokens_max)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 1e-9, 1.0)
        _within("top_k", self.top_k, 0, 1 << 24)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)

    @property
    def is_plain(self) -> bool:
        """Nothing but the argmax of the model's own logits."""
        return self.temperature == 0.0 and not self.changes_logits

    @property
    def penalises(self) -> bool:
        return any((self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1.0))

    @property
    def changes_logits(self) -> bool:
        return self.penalises or bool(self.logit_bias) or self.tokens_min > 0


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadInput(f"{name} is {value}, must be {low}..{high}")


def draw(logits: Tensor, sampling: Sampling, *, tokens: list[int], prompt_count: int) -> int:
    """The token after `tokens`, from logits float32 [vocabulary]."""
    if sampling.is_plain:
        return int(logits.argmax())
    if sampling.changes_logits:
        logits = _changed(logits.clone(), sampling, tokens, prompt_count)
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    kept = _filtered(logits / sampling.temperature, sampling)
    return int((kept + gumbel(sampling.seed, len(tokens), len(logits))).argmax())


def gumbel(seed: int, position: int, count: int) -> Tensor:
    """Noise of one position: a counter-based hash, so no state and no order of calls matters."""
    mixed = torch.arange(count, dtype=torch.int64)
    mixed = _mix(mixed + _mix(torch.tensor((seed << 24) ^ position, dtype=torch.int64)))
    uniform = ((mixed >> 11) & ((1 << 52) - 1)).double().add_(0.5).div_(float(1 << 52))
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap."""
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _changed(logits: Tensor, sampling: Sampling, tokens: list[int], prompt_count: int) -> Tensor:
    seen = torch.tensor(sorted(set(tokens)))
    scores = logits[seen]
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    counts = torch.bincount(torch.tensor(tokens[prompt_count:]).long(), minlength=len(logits))
    logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if len(tokens) - prompt_count < sampling.tokens_min:
        logits[list(sampling.stop_ids)] = -torch.inf
    return logits


def _filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    order = logits.sort(descending=True, stable=True)
    chances = order.values.softmax(-1)
    drop = chances < sampling.min_p * chances[0]
    drop |= chances.cumsum(-1) - chances >= sampling.top_p
    if sampling.top_k:
        drop[sampling.top_k :] = True
    drop[0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(0, order.indices, drop), -torch.inf)
