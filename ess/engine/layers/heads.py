"""Which heads of a layer are attended here: all of them, or a share of a team's."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ess.engine.layers.batch import Shared
from ess.models.decoder import DecoderLayer


class Heads(Protocol):
    def joined(self, batch: Shared, layer: DecoderLayer, attended: Tensor) -> Tensor:
        """From what was attended for this rank's heads to what the layer's output takes, of all
        heads."""


class AllHeads:
    def joined(self, batch: Shared, layer: DecoderLayer, attended: Tensor) -> Tensor:
        return attended
