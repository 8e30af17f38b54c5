"""The chances of a prompt's own tokens, for requests that ask for them.

They are computed from a chunk's last states, for some tokens at a time: never more than
`LOGITS_MAX` logits are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ess.engine.layers.batch import ended
from ess.engine.plan import Chunk
from ess.engine.prompt.run import Prefilled
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.logprobs import chances

LOGITS_MAX: Final = 1 << 22


def score(prefilled: Prefilled, chunk: Chunk) -> tuple[Chance, ...]:
    """The chances of the tokens behind the chunk's positions, as the request asks for them."""
    sampling, prompt = chunk.request.sampling, chunk.request.prompt
    if sampling.prompt_logprobs is None:
        return ()
    first = min(max(chunk.start, sampling.prompt_start), chunk.stop)
    following = prompt[first + 1 : chunk.stop + 1]
    if not following:
        return ()
    return tuple(_scored(prefilled, first, following, sampling.prompt_logprobs))


def _scored(chunk: Prefilled, first: int, following: Sequence[int], top_count: int) -> list[Chance]:
    """The chances of `following`, the tokens behind the chunk's positions from `first` on."""
    pack, span, model = chunk.pack, chunk.span, chunk.pack.runner.model
    assert span.start <= first <= span.stop, f"position {first} of [{span.start}, {span.stop})"
    hidden = chunk.hidden[first - span.start :]
    assert len(hidden) == len(following), f"{len(following)} tokens of {len(hidden)} states"
    at_once = max(1, LOGITS_MAX // model.config.vocab_size)
    scored: list[Chance] = []
    for states in torch.split(hidden, at_once):
        targets = following[len(scored) : len(scored) + len(states)]
        scored += chances(ended(pack, model, states)[1], targets, top_count)
    return scored
