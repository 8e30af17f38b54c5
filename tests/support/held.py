"""Every tensor that a model has, or this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from ess.engine.step.runner import pack_weights
from ess.kernels.backend import ops
from ess.models.load import load_model
from ess.models.weights.kept import Fp8Weight
from ess.models.weights.rank import Form


def held(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """However deep it lies. `seen` are the objects that were looked at."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif id(thing) not in seen and type(thing).__module__.startswith(("ess.models", "builtins")):
        seen.add(id(thing))
        inside = thing if isinstance(thing, list | tuple) else getattr(thing, "__dict__", {})
        inside = inside.values() if isinstance(inside, dict) else inside
        if isinstance(thing, Fp8Weight):
            inside = thing.values, thing.scales
        for each in inside:
            yield from held(each, seen)


def engine_bytes(folder: Path, form: Form) -> int:
    """Of the tensors that a model has once its stages are compiled."""
    before = tensor_bytes()
    made = load_model(folder, form=form)
    pack_weights(made, made.config.layout(has_mtp=made.mtp is not None), ops("cpu"))
    return tensor_bytes() - before


def tensor_bytes() -> int:
    """Of all tensors that there are, each memory once."""
    gc.collect()
    memories = (each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor)
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())
