"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from ess.models.model import Model
from ess.models.registry import build
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.folder import Links
from ess.models.weights.rank import RankWeights
from ess.models.weights.split import Split

EMBEDDED: Final = Path(__file__).parent / "tiny" / "checkpoint"


def load_model(
    path: str | os.PathLike[str] = EMBEDDED,
    *,
    form: Literal["bf16", "f32"] = "bf16",
    links: Links = "refuse",
    layers: range | None = None,
    heads: Split | None = None,
) -> Model:
    """Every tensor is checked on the way; the files are closed when this returns.

    Without a path it is the small model in the box. Of a part, which consists of these main layers,
    only its own tensors are read; with `heads`, a split by heads, those of one rank's heads.
    """
    with Checkpoint(path, links=links) as checkpoint:
        weights = RankWeights(checkpoint, form=form, split=heads)
        tp = 1 if heads is None else heads.tp
        return build(checkpoint.model_config, weights.tensor, layers=layers, tp=tp)
