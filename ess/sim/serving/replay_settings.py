"""The settings of a replay: objectives, where prefill runs, the source of misses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ess.errors import BadInput
from ess.sim.serving.goodput import Objective
from ess.sim.serving.replay import WAITING_MAX
from ess.sim.serving.traffic import check_seed

MissesBy = Literal["curve", "lru"]
Auto = Literal["auto"]

AUTO: Final[Auto] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """`tier` is pipelines x GPUs of each for every decode GPU, or "auto" to size it for the
    objective; None prefills beside decode.

    Cached prompt tokens are those of the blocks that a trace names, or this share of every prompt.
    `misses` come from the published curves, or from the product's planner ("lru"). With `is_paced`
    the engine chooses depth, batch and chunk for the objective's time per token.
    """

    objective: Objective
    tier: tuple[int, int] | Auto | None = None
    cached_share: float | None = None
    misses: MissesBy = "curve"
    is_paced: bool = False
    batch_max: int = 512
    chunk_tokens: int = 512
    waiting_max: int = WAITING_MAX
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch_max, self.chunk_tokens) < 1 or self.waiting_max < 0:
            asked = f"batch {self.batch_max}, chunk {self.chunk_tokens}, waiting {self.waiting_max}"
            raise BadInput(f"{asked}: batch and chunk must be 1 or more, waiting 0 or more")
        check_seed(self.seed)
