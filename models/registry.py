"""Model families by the `model_type` of config.json. A family is one file and one line here.

A family's module offers `read(raw) -> ModelConfig` without torch and `build(config, tensor)`, which
brings torch in when it is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack, cast

from ess.errors import BadInput
from ess.models.config import ModelConfig

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model
    from ess.models.part import ModelPart

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "axk2": "ess.models.families.axk2",
        "deepseek_v32": "ess.models.families.deepseek_v32",
        "deepseek_v4": "ess.models.families.deepseek_v4",
        "dots3_note": "ess.models.families.dots3",
        "dots3_note_text": "ess.models.families.dots3",
        "glm_moe_dsa": "ess.models.families.glm_dsa",
        "glm5_next": "ess.models.families.glm5_next",
        "glm5_next_text": "ess.models.families.glm5_next",
        "hy_v4": "ess.models.families.hy_v4",
        "llama": "ess.models.guest.llama",
        "mistral_large4": "ess.models.families.mistral_large4",
    }
)


class Family(Protocol):
    def read(self, raw: Mapping[str, Any]) -> ModelConfig: ...

    def build(
        self, config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]
    ) -> Model: ...


def family(model_type: object) -> Family:
    if not isinstance(model_type, str) or model_type not in MODULES:
        known = ", ".join(sorted(MODULES))
        raise BadInput(
            f"model_type {model_type!r:.60} is not supported; supported: {known}"
            " (models whose attention is sparse, and llama as a small guest)"
        )
    return cast(Family, importlib.import_module(MODULES[model_type]))


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """config.json as a dict -> a validated ModelConfig."""
    return family(raw.get("model_type")).read(raw)


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    """The model over `tensor(name)`, which gives each weight under its checkpoint name; a part of
    it, where `layers` says which; of `tp` ranks' heads those that `tensor` gives."""
    return family(config.family).build(config, tensor, **part)
