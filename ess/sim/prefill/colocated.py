"""Prefill on the GPUs that decode: how much longer a step is, on average, for prompts in between.

In a steady state every step of `requests` ends some of them, and each that ends makes room for one
whose prompt must run. That holds up all attention groups, since they share experts. Prompts that
arrive in one step go together, spread over groups; at fewer than one a step, each goes alone. Where
prompts run in passes of their own (SGLang) a step waits for a whole pass; where they run inside the
steps (vLLM, TensorRT-LLM) steps with a piece of a prompt take longer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from ess.sim.decode_step import Scenario, simulate
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import Operators
from ess.sim.prefill.prompt_pass import PromptPass, pass_us

PIECE: Final = 8192


def stall_us(
    operators: Operators, parallel: Parallel, *, ended_each: float, prompt: int, overlap: bool
) -> float:
    """Extra time per step; `ended_each` is how many requests of all groups end in a step."""
    groups = min(parallel.attention_dp, max(1, math.ceil(ended_each)))
    count = max(1, math.ceil(ended_each / groups))
    us = prompt_us(operators, parallel, prompt=prompt, count=count, groups=groups, overlap=overlap)
    return us * ended_each / (groups * count)


def mixed_us(operators: Operators, scenario: Scenario, *, ended_each: float, prompt: int) -> float:
    """As `stall_us`, with pieces of prompts in the steps of `scenario`."""
    plain_us = simulate(operators, scenario).step_us
    groups = min(scenario.parallel.attention_dp, max(1, math.ceil(ended_each)))
    longer_us = 0.0
    for start in range(0, prompt, PIECE):
        piece = replace(
            scenario,
            prompt_chunk=min(PIECE, prompt - start),
            prompt_prefix=start,
            prompt_groups=groups,
        )
        longer_us += simulate(operators, piece).step_us - plain_us
    return longer_us * ended_each / groups


def prompt_us(
    operators: Operators,
    parallel: Parallel,
    *,
    prompt: int,
    count: int = 1,
    groups: int | None = None,
    overlap: bool = False,
) -> float:
    """Time of the prompts of all `groups`, piece by piece; short ones share a piece."""
    each = max(1, min(count, PIECE * 2 // prompt))
    passes = math.ceil(count / each)
    starts = range(0, prompt, PIECE)
    pieces = [
        PromptPass(
            parallel=parallel,
            tokens=min(PIECE, prompt - start),
            prefix=start,
            count=each,
            overlap=overlap,
            groups=groups,
        )
        for start in starts
    ]
    return passes * math.fsum(pass_us(operators, piece) for piece in pieces)
