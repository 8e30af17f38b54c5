"""The questions for a planner: a context, drafts, GPUs, memory, a time per token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.parallel import Parallel

DRAFT_ACCEPTANCE: Final = 0.7
ACCEPTANCE_SEEN: Final = (0.67, 0.93)
"""The chance of each draft in turn, in public servings: from 2.44 of 4 tokens a step (V3 on H200,
SGLang's post on MTP) to 1.93 of 2 (R1 on H20, Ant Group's log)."""
QUERIES_MAX: Final = 8
"""The most tokens verified per step: the engine's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """At most one of `batch` (per attention group, which is a GPU where attention is not divided)
    and `ratio` (slots over context) is given. `parallel` is how the GPUs share the model, by
    default requests and experts over all of them."""

    context: int
    queries_each: int = 2
    accepted: float | None = None
    gpu_count: int = 32
    parallel: Parallel | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    token_us_max: float | None = None
    batch: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        sizes = {"context": self.context, "mtp": self.queries_each, "gpus": self.gpu_count}
        for name, size in sizes.items():
            if size < 1:
                raise BadInput(f"{name} {size}: it must be 1 or more")
        if self.way.gpu_count != self.gpu_count:
            raise BadInput(f"{self.way} takes {self.way.gpu_count} GPUs, not {self.gpu_count}")
        if self.queries_each > QUERIES_MAX:
            raise BadInput(
                f"mtp {self.queries_each}: the engine verifies at most {QUERIES_MAX} tokens a step"
            )
        if self.batch is not None and self.ratio is not None:
            raise BadInput(f"batch {self.batch} fixes the ratio; leave {self.ratio} out, or batch")
        if self.batch is not None and self.batch < 1:
            raise BadInput(f"a batch of {self.batch} requests per GPU decodes nothing")
        if self.ratio is not None and not 0.0 < self.ratio <= 1.0:
            raise BadInput(f"a ratio of {self.ratio} is outside 0..1, slots over context")
        if not 1.0 <= self.tokens_each <= self.queries_each:
            most = f"between 1 and {self.queries_each} tokens a step"
            raise BadInput(
                f"{self.tokens_each} accepted tokens with mtp {self.queries_each}: {most}"
            )

    @property
    def way(self) -> Parallel:
        return self.parallel or Parallel.wide(self.gpu_count)

    @property
    def tokens_each(self) -> float:
        """Tokens per request and step: as given, or 70 % for each draft in turn."""
        return self._tokens_at(DRAFT_ACCEPTANCE) if self.accepted is None else self.accepted

    @property
    def accepted_band(self) -> tuple[float, float]:
        """How far the tokens of a step may be off, as shares; not at all if they are given."""
        if self.accepted is not None:
            return 0.0, 0.0
        low, high = (self._tokens_at(chance) / self.tokens_each - 1 for chance in ACCEPTANCE_SEEN)
        return low, high

    def _tokens_at(self, chance: float) -> float:
        return math.fsum(chance**draft for draft in range(self.queries_each))
