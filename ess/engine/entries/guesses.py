"""Drafts: the tokens that the MTP module predicts behind the tokens that a step has made.

Its layer attends to the last tokens only, and keeps its rows in rings as the other layers with
windows do. So a draft is one more layer over tokens of the step: first over all of them, each with
the token that follows it, then over one guess of each sequence after the other. Rows of rejected
tokens and of guesses are written over by the next step: it begins behind the newest token that was
kept, whose row is made of true tokens, and makes all rows from there on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.engine.entries.memory import Tokens
from ess.engine.entries.step import EntryBatch
from ess.engine.step.feeding import Chosen


def draft(entered: EntryBatch, streams: Tensor, chosen: Chosen, count: int) -> Tensor | None:
    """`count` guesses of each sequence, int64 [sequences, count], of the streams of its tokens."""
    if not count:
        return None
    tokens = entered.tokens
    streams = _rows(entered, tokens, chosen.following, streams)[chosen.last]
    tokens, guesses = tokens.behind(chosen.last), [_guess(entered, streams)]
    while len(guesses) < count:
        streams = _rows(entered, tokens, guesses[-1], streams)
        tokens = tokens.behind(range(len(streams)))
        guesses.append(_guess(entered, streams))
    return torch.stack(guesses, dim=1)


def _rows(entered: EntryBatch, tokens: Tokens, following: Tensor, streams: Tensor) -> Tensor:
    """The streams that the module makes from these tokens."""
    model = entered.model
    assert model.module is not None, "drafts need an MTP module"
    joined = model.module.join(model.embedded(following), streams)
    return entered.other(tokens, following).run(model.module.layer, joined)


def _guess(entered: EntryBatch, streams: Tensor) -> Tensor:
    model = entered.model
    assert model.module is not None, "drafts need an MTP module"
    return model.logits(model.module.finish(streams)).argmax(-1)
