"""Tensors as a checkpoint folder holds them: three forms, one file, and back."""

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
from ess.models.weights.expected.shapes import SCALE_SUFFIX, expected_tensors

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


def write_checkpoint(folder: Path, config: dict[str, Any], held: dict[str, Tensor]) -> None:
    """config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {name: held[name].contiguous() for name in sorted(held)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors in f32, for measuring our own files."""
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
