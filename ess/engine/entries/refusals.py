"""What engines of models with states cannot do yet, each by its name. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from ess.engine.config import EngineConfig
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.compressed.layout import VERIFIED_MAX
from ess.models.config import ModelConfig

LACKS: Final[Mapping[str, str]] = {
    "tbo": "the steps of its layers are not cut in two halves",
    "sbo": "its experts compute in one go",
    "deterministic": "it has no compiled stages",
    "device": "its layers are computed on the CPU",
    "backend": "its layers are computed on the CPU",
    "fake_prefill": "rows that are invented have no state beside them",
    "pp_size": "its layers are not divided",
    "tp_size": "its heads are not divided",
    "cp_size": "its chunks are not divided",
    "dp_size": "its experts are not divided",
    "prefix_cache_dir": "states beside rows are not kept on a disk",
    "kv_events": "routers are told of pages of 64 tokens, and a page has 64 entries",
}
ALLOWED: Final = {"backend": ("cpu", "reference")}
WITH_STATES: Final = (
    *("deterministic", "device", "backend", "fake_prefill"),
    *("pp_size", "tp_size", "cp_size", "dp_size", "prefix_cache_dir"),
)
"""The part of `LACKS` that holds for models with rows of tokens and states beside them."""


def lacks(model: ModelConfig) -> Mapping[str, str]:
    """The settings that engines of this model lack; none for models without states."""
    if model.compressed is not None:
        return LACKS
    return {name: LACKS[name] for name in WITH_STATES} if model.states.fields else {}


def check_settings(model: ModelConfig, config: EngineConfig) -> None:
    """Raises one sentence, which serves for a server's settings too."""
    if missing := lacks(model):
        _check_mtp(model, config.mtp)
    usual = {field.name: (field.default,) for field in fields(config)} | ALLOWED
    for name, why in missing.items():
        given = getattr(config, name, None)
        if name in usual and given not in usual[name]:
            raise BadInput(f"{name} is {given}, and the model is {model.family}: {why}")


def _check_mtp(model: ModelConfig, mtp: int) -> None:
    if mtp > 1 and not model.mtp_layer_count:
        raise BadInput(f"mtp is {mtp}, and this {model.family} has no MTP module that is read")
    if mtp > VERIFIED_MAX:
        raise BadInput(
            f"mtp is {mtp}, and the model is {model.family}: states beside rows have room for"
            f" {VERIFIED_MAX} tokens of a step"
        )


def check_layout(model: ModelConfig, layout: ModelLayout) -> None:
    """Refuses a layout whose layers with rows, or whose groups that share a selection, are not the
    model's. How rows are coded is for the layout to say."""
    own, kept = model.row_groups, layout.groups[: layout.main_group_count]
    if own != kept:
        raise BadInput(
            f"the layout {layout.name} has {layout.layer_count} layers with rows in {len(kept)}"
            f" groups, and the model {model.family} has {sum(map(len, own))} in {len(own)}, or the"
            " layers that share a selection differ: take the layout of the model's config"
        )
