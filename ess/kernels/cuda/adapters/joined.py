"""The cuda ops where kernels of other libraries have been chosen: theirs for what they take, ours
for the rest.

What a library takes follows from a call's shapes, types and flags alone: nothing is looked at on
the device, and a graph that was captured with a library's kernel has it in every replay.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ess.kernels.calls import Attend, Backend, IndexQueries, Linear, Products
from ess.kernels.cuda.adapters.choice import Choice
from ess.kernels.cuda.adapters.deep_gemm import CODEC, DeepGemm, whole_lines
from ess.kernels.cuda.adapters.deep_gemm_experts import coded
from ess.kernels.ops import Ops


def joined(own: Ops, choice: Choice) -> Backend:
    if not any(choice[:4]):
        return own.backend
    return cast(Backend, Joined(own, choice))


class Joined:
    """A `Backend`: what is not named here is ours."""

    def __init__(self, own: Ops, choice: Choice) -> None:
        self._own, self._ours = own, own.backend
        self._choice = choice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def implementation(self) -> str:
        return "; ".join((self._ours.implementation(), *self._choice.lines))

    def attend(self, call: Attend) -> None:
        """Rows in place are attended by ours, and the two parts merged: where there is none, what
        comes out is the library's, bit for bit."""
        theirs, into = self._choice.attention, call.into
        if theirs is None or not theirs.takes(call):
            return self._ours.attend(call)
        in_slots = call.slots if call.placed is None else call.slots.clamp(min=-1)
        partial = theirs.attend(call.queries, call.rows, in_slots, scale=call.scale)
        if call.placed is None:
            into.out.copy_(partial.out)
            into.lse.copy_(partial.lse)
            return None
        others = call.slots.masked_fill(call.slots >= 0, -1)
        self._ours.attend(call._replace(slots=others))
        return self._ours.merge(partial, into, into)

    def index_top_k(self, call: IndexQueries, out: Tensor) -> None:
        theirs = self._choice.indexer
        if theirs is None or not theirs.takes(call):
            return self._ours.index_top_k(call, out)
        self._index(theirs, call, out)
        return None

    def index_scored(self, call: IndexQueries, out: Tensor) -> Tensor:
        theirs = self._choice.indexer
        if theirs is None or not theirs.takes(call):
            return self._ours.index_scored(call, out)
        return whole_lines(self._index(theirs, call, out))

    def _index(self, theirs: DeepGemm, call: IndexQueries, out: Tensor) -> Tensor:
        """Scales of queries go into their weights."""
        queries, weights, pages, table, lengths, _, threads, each = call
        if queries.dtype != torch.float8_e4m3fn:
            codes, scales = coded(self._own, queries.flatten(1), CODEC)
            queries, weights = codes.view(queries.shape), weights * scales
        logits = theirs.index_logits(
            queries, weights, pages, table, lengths, queries_per_request=each
        )
        self._ours.top_k(logits, lengths, out, threads)
        return logits

    def expert_products(self, call: Products) -> None:
        theirs, scales = self._choice.experts, call.scales
        if theirs is None or scales is None or not theirs.takes(call):
            return self._ours.expert_products(call)
        theirs.expert_products(call.tokens, call.ends, call.weights, scales=scales, out=call.out)
        return None

    def linear_fp8(self, call: Linear) -> None:
        theirs = self._choice.dense
        if theirs is None or not theirs.takes(call):
            return self._ours.linear_fp8(call)
        theirs.linear_fp8(call.values, call.weights, call.scales, out=call.out)
        return None

    def counts_to_build(self, weights: Tensor, count_max: int) -> list[int]:
        theirs = self._choice.dense if weights.dim() == 2 else self._choice.experts
        if theirs is None:
            return self._ours.counts_to_build(weights, count_max)
        return theirs.counts_to_build(weights, count_max)
