"""Which part of a model is built, and by whom. Needs no torch.

Families and their layers hand these on as they get them, so a family's file names none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from ess.errors import BadInput

if TYPE_CHECKING:
    from ess.comm.experts.expert_ranks import ExpertRanks
    from ess.models.config import ModelConfig


class Sharing(TypedDict, total=False):
    """`tp` ranks share the heads of each layer, the ranks of `expert_ranks` its experts."""

    tp: int
    expert_ranks: ExpertRanks | None


class ModelPart(Sharing, total=False):
    """The part of a model: the run of consecutive `layers`, None for all."""

    layers: range | None


class LayerPlace(Sharing, total=False):
    """The place of a layer: `first` is where its part of the model begins."""

    first: int


def require_all_heads(config: ModelConfig, part: ModelPart) -> None:
    if (tp := part.get("tp", 1)) != 1:
        raise BadInput(f"{tp} ranks cannot share the heads of {config.family}")
