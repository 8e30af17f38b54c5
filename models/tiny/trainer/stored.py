"""Tensors as a checkpoint folder holds them: three forms, one or more files, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ess.errors import BadInput
from ess.models.registry import read_config
from ess.models.weights.blocks import dequantise, quantise
from ess.models.weights.shapes import SCALE_SUFFIX, expected_tensors

Form = Literal["f32", "bf16", "fp8"]
FORMS: Final = ("f32", "bf16", "fp8")


def stored_form(
    config: dict[str, Any], tensors: dict[str, Tensor], form: Form
) -> dict[str, Tensor]:
    """The tensors as a checkpoint of this form holds them; fp8 adds the `_scale_inv` tensors."""
    if form not in FORMS:
        raise BadInput(f"form {form!r} is not one of {FORMS}")
    held: dict[str, Tensor] = {}
    for spec in expected_tensors(read_config(config)):
        weight = tensors[spec.name]
        if form == "f32" or spec.role in ("norm", "correction"):
            held[spec.name] = weight.float()
        elif form == "bf16" or spec.role == "table":
            held[spec.name] = weight.bfloat16()
        else:
            held[spec.name], held[spec.scale_name] = quantise(weight)
    return held


def write_checkpoint(
    folder: Path, config: dict[str, Any], held: dict[str, Tensor], *, shards: int = 1
) -> None:
    """config.json, safetensors files, and their index when there is more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    ordered = sorted(held)
    if not 1 <= shards <= len(ordered):
        raise BadInput(f"shards is {shards}, need 1..{len(ordered)}")
    where: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors"
        if shards > 1:
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = ordered[shard::shards]
        tensors = {name: held[name].contiguous() for name in part}
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    if shards > 1:
        size = sum(held[name].numel() * held[name].element_size() for name in ordered)
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors in f32: for measuring our own files, which are one shard."""
    config = json.loads((folder / "config.json").read_text())
    held = load_file(folder / "model.safetensors")
    plain: dict[str, Tensor] = {}
    for name, tensor in held.items():
        if not name.endswith(SCALE_SUFFIX):
            scale = held.get(name + SCALE_SUFFIX)
            plain[name] = (
                tensor.float() if scale is None else dequantise(tensor, scale, dtype=torch.float32)
            )
    return config, plain
