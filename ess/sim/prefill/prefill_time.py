"""The time of prefill, and where it runs: beside decode, or on a tier of its own.

The time comes from two passes over a piece of a prompt, one from nothing and one behind a long
prefix. Rates are of one GPU among many that share the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ess.engine.chunking.sizes import Chunking, PrefillTime, chunks
from ess.errors import BadInput
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import Operators
from ess.sim.prefill.pipeline import Pipeline, prefill
from ess.sim.prefill.prompt_pass import PromptPass, pass_us
from ess.units import PAGE_ROWS, align_up, div_ceil

FIRST_CHUNK: Final = 8192
FAR: Final = 120 * 1024
FLAT: Final = 1e-15
NIC_RATE: Final = 50e3
"""Bytes per microsecond: 400 Gbit/s for every GPU."""


def time_of(operators: Operators, parallel: Parallel) -> PrefillTime:
    """Prefill time of one GPU among those of `parallel`, all of which prefill: from a first piece
    and one behind `FAR` tokens. A GPU is charged its share of a pass: GPUs that hold heads in parts
    prefill one prompt together."""
    first_s, far_s = (
        pass_us(
            operators,
            PromptPass(parallel=parallel, tokens=FIRST_CHUNK, prefix=prefix, overlap=True),
        )
        * parallel.attention_tp
        / 1e6
        for prefix in (0, FAR)
    )
    quadratic = max((far_s - first_s) / (2 * FIRST_CHUNK * FAR), FLAT)
    return PrefillTime(
        quadratic=quadratic, linear=max(0.0, first_s / FIRST_CHUNK - quadratic * FIRST_CHUNK)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What a prefilled request waits for before it may decode: the transfer of the last chunk's
    rows (earlier ones land during later chunks), and of its index keys to the device."""

    token_bytes: int
    index_page_bytes: int
    link_rate: float
    nic_rate: float = NIC_RATE

    def seconds(self, *, prompt: int, last_chunk: int) -> float:
        wire_us = last_chunk * self.token_bytes / self.nic_rate
        index_us = div_ceil(prompt, PAGE_ROWS) * self.index_page_bytes / self.link_rate
        return (wire_us + index_us) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Pipelines of `stages` GPUs that prefill for one decode GPU; each request runs in one
    pipeline.

    The next prompt enters a pipeline as soon as its busiest stage is done with the prompt before.
    """

    pipelines: int
    stages: int
    time: PrefillTime
    handoff: Handoff
    layer_count: int

    def __post_init__(self) -> None:
        if not (1 <= self.pipelines <= 1024 and 1 <= self.stages <= self.layer_count):
            asked = f"{self.pipelines} prefill pipelines of {self.stages} GPUs"
            raise BadInput(
                f"{asked}: there can be 1 to 1024 pipelines of 1 to {self.layer_count} GPUs"
            )

    def seconds(self, prompt: int, *, cached: int = 0) -> tuple[float, float]:
        """How long a prompt occupies its pipeline, and how long until it may decode.

        The last token is left to decode, which runs it first.
        """
        assert 0 <= cached < prompt, f"{cached} of {prompt} tokens are cached"
        tokens = prompt - 1
        if cached == tokens:
            return 0.0, self.handoff.seconds(prompt=prompt, last_chunk=0)
        chunking = Chunking(first=FIRST_CHUNK, context=align_up(tokens, PAGE_ROWS))
        sizes = chunks(self.time, chunking, prompt=tokens, done=cached)
        pipeline = Pipeline.of_layers(layers=self.layer_count, stages=self.stages)
        prefilled = prefill(self.time, pipeline, sizes, after=cached)
        landed_s = self.handoff.seconds(prompt=prompt, last_chunk=sizes[-1])
        return prefilled.busy_s, prefilled.ttft_s + landed_s
