"""Verify mode: now and then a layer is computed again from the truth and compared.

Two comparisons, on one layer of every n-th step, another layer each time. Every clean slot must
hold the bytes of its row on the host. And the layer's attention, over whatever mix of hits, fetched
rows and rows in place its schedule used, must equal one pass over the host's own rows. The first
finds a wrong copy even if no query selects it; the second finds a right copy that is read for the
wrong row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from ess.engine.layers.attention import LayerStep
from ess.engine.layers.batch import Batch
from ess.errors import EssError

TOLERANCE: Final = 1e-3
LISTED_MAX: Final = 100


class Mismatched(EssError):
    """Verify mode found a difference and was asked to stop at the first."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where: a query whose attention differs, or a slot whose bytes differ."""

    step: int
    layer: int
    sentence: str


@dataclass(slots=True, kw_only=True)
class Verifier:
    """`every` n-th step one layer is checked; 0 never. The counts are for people and metrics."""

    every: int = 0
    is_fatal: bool = False
    checked_count: int = 0
    mismatch_count: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    def layer_for(self, step_number: int, layer_count: int) -> int | None:
        if self.every == 0 or step_number % self.every:
            return None
        return step_number // self.every % layer_count

    def check(self, batch: Batch, stages: LayerStep, attended: Tensor) -> None:
        """Compare one layer of this step; call before the step is committed."""
        self.checked_count += 1
        for slot, row in batch.offload.verify(stages.number):
            self._note(batch, stages.number, f"slot {slot} differs from row {row} on the host")
        expected = stages.attend_truth()
        worst = (attended - expected).abs().flatten(1).amax(1)
        assert attended.shape == expected.shape, f"{attended.shape} against {expected.shape}"
        scale = expected.abs().amax().clamp_min(1.0)
        for query in torch.nonzero(~(worst <= TOLERANCE * scale)).flatten().tolist():
            difference, first = float(worst[query]), stages.first_query
            self._note(
                batch,
                stages.number,
                f"query {first + query}: attention differs by {difference:.2e}",
            )

    def _note(self, batch: Batch, layer: int, sentence: str) -> None:
        self.mismatch_count += 1
        mismatch = Mismatch(batch.step.number, layer, sentence)
        if len(self.mismatches) < LISTED_MAX:
            self.mismatches.append(mismatch)
        if self.is_fatal:
            raise Mismatched(f"step {mismatch.step}, layer {layer}: {sentence}")
