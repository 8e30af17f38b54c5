"""Layers with an indexer beside layers that attend to the last tokens (dots3)."""

from __future__ import annotations

from torch import Tensor

from ess.comm.company import Company
from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.families.gates import HeadGatedMla
from ess.models.layers import RotaryPositions, Rotation, Source


class WindowLayer(DecoderLayer):
    mla: HeadGatedMla
    has_stages = False

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        number: int,
        *,
        first: int = 0,
        tp: int = 1,
        company: Company | None = None,
    ) -> None:
        super().__init__(config, source, number, first=first, tp=tp, company=company)
        self._turns = None
        if number in config.window_layers:
            assert config.window is not None, "layers of no window"
            self.window = config.window.size
            self._turns = RotaryPositions(config.at_layer(number), self.mla.device)

    def _attention(self, config: ModelConfig, source: Source, tp: int) -> HeadGatedMla:
        return HeadGatedMla(config, source)

    def turning(self, rotation: Rotation) -> Rotation:
        return rotation if self._turns is None else self._turns.at(rotation.positions)

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self.mla.gated_output(self._input_norm(hidden), attended)
