"""Layers with an indexer beside layers that attend to the last tokens (dots3)."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.families.layers.gates import HeadGatedMla
from ess.models.layers import RotaryPositions, Rotation, Source
from ess.models.part import LayerPlace


class WindowLayer(DecoderLayer):
    mla: HeadGatedMla
    has_stages = False

    def __init__(
        self, config: ModelConfig, source: Source, number: int, **place: Unpack[LayerPlace]
    ) -> None:
        super().__init__(config, source, number, **place)
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
