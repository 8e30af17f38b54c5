"""A family of our own, all of it: DeepSeek-V3.2 with a sink per head and gates of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.config_json.reading import parse
from ess.models.decoder import DecoderLayer
from ess.models.families.deepseek_v32 import DEFAULTS
from ess.models.families.layers.gates import InputGatedMla
from ess.models.layers import Source, TensorSource
from ess.models.model import Model
from ess.models.part import ModelPart, require_all_heads


def read(raw: Mapping[str, Any]) -> ModelConfig:
    own = {"value_gates": "input", "has_sinks": True}
    return parse(raw, defaults=DEFAULTS, fixed={"indexer_rope_interleave": False}, own=own)


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    require_all_heads(config, part)
    return Model(config, tensor, **part, layer=SunkLayer)


class SunkLayer(DecoderLayer):
    mla: InputGatedMla
    has_stages = False

    def _attention(self, config: ModelConfig, source: Source, tp: int) -> InputGatedMla:
        return InputGatedMla(config, source)

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self.mla.gated_output(self._input_norm(hidden), attended)
