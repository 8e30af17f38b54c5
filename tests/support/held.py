"""Every tensor that a model has."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ess.models.weights.kept import Fp8Weight


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
