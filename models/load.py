"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
import torch

from ess.comm.experts.expert_ranks import ExpertRanks
from ess.errors import BadInput
from ess.kernels.backend import ops
from ess.models.config import ModelConfig
from ess.models.guest.coded import CodedFile
from ess.models.layers import TensorSource
from ess.models.model import Model
from ess.models.registry import build
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.expected.split import Split
from ess.models.weights.kept import Weight
from ess.models.weights.rank import Form, RankWeights

EMBEDDED: Final = Path(__file__).parent / "tiny" / "checkpoint"


def load_model(
    path: str | os.PathLike[str] = EMBEDDED,
    *,
    form: Form = "bf16",
    layers: range | None = None,
    heads: Split | None = None,
    expert_ranks: ExpertRanks | None = None,
    device: str | torch.device = "cpu",
    top_k: int | None = None,
) -> Model:
    """Every tensor is checked on the way; the files are closed when this returns.

    Without a path it is the small model in the box. For a part of the model, which consists of
    these main layers, only its own tensors are read; with `heads`, a split by heads, only those of
    one rank's heads; with `expert_ranks`, only this rank's share of the experts. On a `device` the
    tensors go there one by one, so the host never has all of them; there weights may also stay as
    they are "stored", in blocks of fp8. Nothing in the weights depends on `top_k`: it may be
    another than the checkpoint's.
    """
    place = torch.device(device)
    if expert_ranks is not None and heads is not None:
        raise BadInput("experts are divided among ranks that have all heads")
    if form == "stored" and place.type == "cpu":
        raise BadInput("form 'stored' is for a device; on the CPU weights are in 'bf16' or 'f32'")
    with Checkpoint(path) as checkpoint:
        config = checkpoint.model_config
        weights = RankWeights(checkpoint, form=form, split=heads or split_of(expert_ranks, config))
        tp = 1 if heads is None else heads.tp
        if top_k is not None:
            config = msgspec.structs.replace(config, top_k=top_k)
        source = placed(weights, place)
        if config.is_grouped and form == "bf16" and place.type == "cpu" and ops("cpu").has_stages():
            source = coded(source, CodedFile(Path(path)), checkpoint)
        return build(config, source, layers=layers, tp=tp, expert_ranks=expert_ranks)


def coded(source: TensorSource, file: CodedFile, checkpoint: Checkpoint) -> TensorSource:
    """Reads weights; those that have codes come as codes."""

    def weight(name: str) -> Weight:
        shape = checkpoint.entry(name).shape
        return file.weight(name, shape) or source(name)

    return weight


def split_of(expert_ranks: ExpertRanks | None, config: ModelConfig) -> Split | None:
    if expert_ranks is None:
        return None
    own = {layer: frozenset(expert_ranks.own(layer)) for layer in range(config.layer_total)}
    return Split(ep=expert_ranks.team.size, ep_rank=expert_ranks.team.rank, own=own)


def placed(weights: RankWeights, device: torch.device) -> TensorSource:
    """The weights by name, each on the device when it is asked for."""

    def weight(name: str) -> Weight:
        if weights.keeps_blocks(name):
            return weights.kept(name).to(device)
        return weights.tensor(name).to(device)

    return weight
