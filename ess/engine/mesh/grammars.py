"""Grammars in a mesh: rank 0 has the processes that follow them, and tells all ranks which
tokens they allow.

    in each step     which requests wait for their grammar no more, while any request waits for one
    before a decode  the masks of its queries, while a request of the batch has a grammar

Which requests wait, and which are in a batch, follows from the calls alone, so all ranks expect the
same words. A process that ends, or a grammar that takes too much time, is seen on rank 0 only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ess.engine.mesh.lockstep import Lockstep
from ess.engine.mesh.words import Allowed, Compiled, Masks
from ess.engine.requests.entry import Entry
from ess.engine.requests.request import Request
from ess.engine.step.underway.future import HostInput
from ess.engine.tokens.grammar import Follows, Grammar
from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.text.tokenizer import Tokenizer


class ToldMatcher:
    """`Follows`, by the masks that rank 0 sends; there the matcher that it `asks` makes them."""

    def __init__(self, vocabulary: int, asks: Follows | None = None) -> None:
        self._vocabulary = vocabulary
        self._asks = asks
        self._told: Masks
        self._output_count: int

    @property
    def failure(self) -> str:
        return self._told.failure

    def ask(self, output: Sequence[int], drafts: Sequence[int]) -> Masks:
        assert self._asks is not None, "only rank 0 asks"
        masks = self._asks.allowed(output, drafts)
        return Masks(len(masks), np.packbits(masks).tobytes(), self._asks.failure)

    def give(self, masks: Masks, output: Sequence[int]) -> None:
        self._told, self._output_count = masks, len(output)

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> NDArray[np.bool_]:
        shape = self._told.count, self._vocabulary
        assert len(output) == self._output_count, f"masks behind {self._output_count} tokens"
        assert 0 < shape[0] <= 1 + len(drafts), f"{shape[0]} masks for {len(drafts)} drafts"
        bits = np.unpackbits(np.frombuffer(self._told.bits, np.uint8), count=math.prod(shape))
        return bits.view(np.bool_).reshape(shape)

    def close(self) -> None:
        if self._asks is not None:
            self._asks.close()


class MeshEntry(Entry):
    """`Entry` of a rank; rank 0 alone has grammars compiled."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer | None, lockstep: Lockstep
    ) -> None:
        super().__init__(config, tokenizer)
        self._lockstep = lockstep

    def compiled(self) -> list[Request]:
        if self.is_empty:
            return []
        return self._said() if self._lockstep.is_lead else self._heard()

    def _said(self) -> list[Request]:
        done = super().compiled()
        for request in done:
            if request.matcher is not None:
                request.matcher = ToldMatcher(self._vocabulary, request.matcher)
        faults = {each.number: str(each.refusal or "") for each in done}
        self._lockstep.pass_on(Compiled(faults))
        return done

    def _heard(self) -> list[Request]:
        faults = self._lockstep.passed(Compiled).faults
        done = [request for request in self._compiling if request.number in faults]
        for request in done:
            del self._compiling[request]
            if fault := faults[request.number]:
                request.refusal = BadInput(fault)
            else:
                request.matcher = ToldMatcher(self._vocabulary)
        return done

    def _want(self, grammar: Grammar) -> None:
        if self._lockstep.is_lead:
            super()._want(grammar)


def restrict(lockstep: Lockstep, fed: HostInput) -> None:
    """The requests of a step that have a grammar get the masks of their queries."""
    followed = [feed for feed in fed.feeds if feed.request.matcher is not None]
    if not followed:
        return
    matchers = [cast(ToldMatcher, feed.request.matcher) for feed in followed]
    if lockstep.is_lead:
        each = zip(followed, matchers, strict=True)
        asked = tuple(by.ask(feed.request.output, feed.tokens[1:]) for feed, by in each)
        lockstep.pass_on(Allowed(asked))
    else:
        asked = lockstep.passed(Allowed).masks
    for feed, by, masks in zip(followed, matchers, asked, strict=True):
        by.give(masks, feed.request.output)
