"""One pass over prompts on a prefill GPU, from measured context modules.

Every attention group runs `count` prompts of `tokens` each, behind `prefix` others. With overlap
the pass goes in two halves, as a decode step does: by prompts, or, of one prompt, by tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ess.errors import BadInput
from ess.sim.decode_step import lay_out, stages_of
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import MicroBatch, Operators, Trust

NO_DECODE: Final = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPass:
    """`groups` of the attention groups have a prompt; by default all."""

    parallel: Parallel
    tokens: int
    prefix: int = 0
    count: int = 1
    overlap: bool = False
    groups: int | None = None

    def __post_init__(self) -> None:
        if min(self.tokens, self.count) < 1 or self.prefix < 0:
            raise BadInput(
                f"{self.count} prompts of {self.tokens} tokens behind {self.prefix}: prompts and "
                "tokens must be 1 or more, the prefix not negative"
            )
        if self.groups is not None and not 1 <= self.groups <= self.parallel.attention_dp:
            raise BadInput(
                f"prompts in {self.groups} attention groups, there are {self.parallel.attention_dp}"
            )

    @property
    def whole(self) -> MicroBatch:
        return MicroBatch(
            request_count=NO_DECODE,
            queries_each=1,
            context=self.prefix + self.tokens,
            parallel=self.parallel,
            prompt_tokens=self.count * self.tokens,
            prompt_prefix=self.prefix,
            prompt_count=self.count,
            prompt_groups=self.groups,
        )

    @property
    def half(self) -> MicroBatch:
        """A half of the pass; halves of one prompt lie behind one another, both at their mean."""
        whole = self.whole
        if self.count > 1:
            each = math.ceil(self.count / 2)
            return replace(whole, prompt_tokens=each * self.tokens, prompt_count=each)
        each = math.ceil(self.tokens / 2)
        return replace(whole, prompt_tokens=each, prompt_prefix=self.prefix + each // 2)


def pass_us(operators: Operators, prompts: PromptPass) -> float:
    layers_us = _laid_out_us(operators, prompts.whole, half_count=1)
    if prompts.overlap and prompts.count * prompts.tokens > 1:
        layers_us = min(layers_us, _laid_out_us(operators, prompts.half, half_count=2))
    return layers_us + operators.around_us(prompts.whole)


def pass_trust(operators: Operators, prompts: PromptPass) -> Trust:
    return operators.trust(prompts.whole)


def _laid_out_us(operators: Operators, shape: MicroBatch, *, half_count: int) -> float:
    layers = stages_of(operators, shape)
    return lay_out(layers, [None] * len(layers), half_count=half_count).end_us
