"""The tokens a request takes from one step: verification of drafts by drawing the targets.

All targets of all requests are drawn at once. The target of a query is the token that the request
would make there if the drafts before it were right: the sampling state is read ahead along the
drafts. Behind the first wrong draft no target counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ess.engine.plan import Feed
from ess.engine.requests.request import Request
from ess.engine.tokens.bad_words import BadWords
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.counts import Tally
from ess.engine.tokens.draw import NOT_A_NUMBER, draw
from ess.engine.tokens.logprobs import chances


class Choice(NamedTuple):
    """The step's tokens for a request; those behind a token that ends the request are surplus. The
    chances are there only if the request asks for them. Where logits were NaN the last token is a
    placeholder, and the request must end."""

    tokens: tuple[int, ...]
    chances: tuple[Chance, ...] = ()
    is_broken: bool = False

    @property
    def made(self) -> tuple[int, ...]:
        return self.tokens[:-1] if self.is_broken else self.tokens


def chosen(targets: tuple[int, ...]) -> Choice:
    """The choice that `targets` make, as they were drawn; the last may be `NOT_A_NUMBER`."""
    is_broken = targets[-1] == NOT_A_NUMBER
    tokens = (*targets[:-1], 0) if is_broken else targets
    assert min(tokens) >= 0, f"{targets}: a token behind logits that are no numbers"
    return Choice(tokens, is_broken=is_broken)


def choose_all(feeds: Sequence[Feed], logits: Tensor) -> list[Choice]:
    """From logits float32 [queries of all feeds, vocabulary], which stay as they are."""
    counts = [len(feed.tokens) for feed in feeds]
    assert sum(counts) == len(logits), f"{len(logits)} rows of logits for {sum(counts)} queries"
    changed, open_counts = changed_logits(feeds, logits, counts)
    samplings = [feed.request.sampling for feed in feeds for _ in feed.tokens]
    targets = draw(changed, samplings, _positions(feeds)).tolist()
    are_numbers = min(targets) > NOT_A_NUMBER
    choices, at = [], 0
    for feed, count, open_count in zip(feeds, counts, open_counts, strict=True):
        if count == 1:
            tokens: tuple[int, ...] = (targets[at],)
        else:
            tokens = _accepted(feed.tokens[1:], targets[at : at + open_count])
        assert tokens, f"request {feed.request.number} makes a token in every step"
        assert 1 <= open_count <= count, f"{open_count} of {count} queries may count"
        drafts = feed.tokens[1 : len(tokens)]
        assert drafts == tokens[:-1], f"a token behind a wrong draft: {drafts}, {tokens}"
        choice = Choice(tokens) if are_numbers else chosen(tokens)
        top_count = feed.request.sampling.logprobs
        if top_count is not None:
            lines, ids = logits[at:][: len(tokens)], choice.tokens
            choice = choice._replace(chances=chances(lines, ids, top_count))
        choices.append(choice)
        at += count
    assert at == len(targets), f"{at} of {len(targets)} targets were looked at"
    return choices


def _positions(feeds: Sequence[Feed]) -> list[int]:
    positions: list[int] = []
    for feed in feeds:
        first = feed.position + 1
        positions.extend(range(first, first + len(feed.tokens)))
    return positions


def _accepted(drafts: Sequence[int], targets: Sequence[int]) -> tuple[int, ...]:
    """The targets up to the first that differs from its draft."""
    right = [draft == target for draft, target in zip(drafts, targets, strict=False)]
    count = right.index(False) + 1 if False in right else len(targets)
    return tuple(targets[:count])


def changed_logits(
    feeds: Sequence[Feed], logits: Tensor, counts: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Logits to draw from, and how many queries of each feed may count."""
    if all(feed.request.is_plain for feed in feeds):
        return logits, list(counts)
    logits = logits.clone()
    parts = torch.split(logits, list(counts))
    return logits, [_change(feed, part) for feed, part in zip(feeds, parts, strict=True)]


def _change(feed: Feed, logits: Tensor) -> int:
    """Penalties, bias, allowed ids, bad words, the least length and the grammar, in place on one
    feed's rows."""
    request, drafts = feed.request, feed.tokens[1:]
    sampling = request.sampling
    if sampling.penalises:
        _penalise(request, drafts, logits)
    if sampling.logit_bias:
        bias = torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
        logits[:, list(sampling.logit_bias)] += bias
    if sampling.allowed_ids is not None:
        _allow(sampling.allowed_ids, logits)
    if sampling.bad_words:
        _forbid(request, drafts, logits)
    assert not (sampling.grammar and request.matcher is None), "a grammar without its matcher"
    assert logits.shape[0] == len(feed.tokens), f"{len(logits)} rows for {len(feed.tokens)} queries"
    early_count = max(0, sampling.tokens_min - len(request.output))
    if early_count:
        logits[:early_count, sorted(request.ends)] = -torch.inf
    if sampling.allowed_ids is not None:
        _free_stuck(sampling.allowed_ids, logits)
    return len(logits) if request.matcher is None else _restrict(request, drafts, logits)


def _allow(allowed: frozenset[int], logits: Tensor) -> None:
    ids = sorted(allowed)
    kept = logits[:, ids]
    logits.fill_(-torch.inf)
    logits[:, ids] = kept


def _forbid(request: Request, drafts: Sequence[int], logits: Tensor) -> None:
    if request.bad_words is None:
        request.bad_words = BadWords(request.sampling.bad_words)
    for query, ids in enumerate(request.bad_words.forbidden(request.output, drafts)):
        logits[query, ids] = -torch.inf


def _free_stuck(allowed: frozenset[int], logits: Tensor) -> None:
    """Where bad words and the least length leave none of the allowed ids, those win."""
    is_stuck = logits.amax(-1) == -torch.inf
    if is_stuck.any():
        logits[torch.nonzero(is_stuck), sorted(allowed)] = 0.0


def _penalise(request: Request, drafts: Sequence[int], logits: Tensor) -> None:
    """Repetition counts the prompt, presence and frequency only what the request said itself."""
    sampling = request.sampling
    if request.tally is None:
        request.tally = Tally(request.prompt if sampling.repetition_penalty != 1.0 else ())
    request.tally.follow(request.output)
    ahead = request.tally.ahead(drafts)
    ids, times, seen = (
        torch.from_numpy(part).to(logits.device) for part in (ahead.ids, ahead.times, ahead.seen)
    )
    scores = logits[:, ids]
    penalty = sampling.repetition_penalty
    repeated = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(seen, repeated, scores)
    scores -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
    logits[:, ids] = scores


def _restrict(request: Request, drafts: Sequence[int], logits: Tensor) -> int:
    """Where bad words and the least length leave nothing that the grammar allows, it wins."""
    assert request.matcher is not None
    masks = request.matcher.allowed(request.output, drafts)
    assert 1 <= len(masks) <= len(logits), f"{len(masks)} masks for {len(logits)} queries"
    assert masks.any(axis=1).all(), "a mask without a token"
    allowed = torch.from_numpy(masks).to(logits.device)
    part = logits[: len(allowed)].masked_fill_(~allowed, -torch.inf)
    is_stuck = part.amax(-1) == -torch.inf
    part[is_stuck[:, None] & allowed] = 0.0
    return len(allowed)
