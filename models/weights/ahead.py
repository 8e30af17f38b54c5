"""Products with weights in fp8, made before there are requests where a library compiles programs
for them: so that no prompt and no step waits for a compiler.

A program is compiled for a weight's shape and for some of the numbers of tokens, which
`Backend.counts_to_build` lists. So one weight of each shape stands for all weights of that shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ess.clock import Clock
from ess.kernels.backend import ops
from ess.models.weights.kept import Fp8Weight


@torch.inference_mode()
def build_ahead(
    model: object, *, count_max: int, clock: Clock, tell: Callable[[str], None]
) -> None:
    """For products of 1 to `count_max` tokens. `tell` is given a line for each shape, since a first
    start may take minutes of which nothing else is seen."""
    started_s, shapes = clock.now_s(), one_of_each_shape(model)
    for number, weight in enumerate(shapes, start=1):
        if weight.values.is_cpu:
            continue
        counts = ops("cuda").backend.counts_to_build(weight.values, count_max)
        if not counts:
            continue
        width, depth = weight.shape
        tokens = torch.ones(counts[-1], depth, device=weight.device)
        for count in reversed(counts):
            weight.times(tokens[:count])
        tell(
            f"products in fp8: {width} x {depth} by up to {count_max:,} tokens, shape {number} of"
            f" {len(shapes)}, {clock.now_s() - started_s:.1f} s"
        )


def one_of_each_shape(model: object) -> list[Fp8Weight]:
    """The weights in fp8 that are multiplied with a model's tokens, one of each shape. A model is
    made of objects of `ess.models`, in tuples and lists; weights of experts are stacked tensors,
    and no `Fp8Weight`."""
    found: dict[torch.Size, Fp8Weight] = {}
    left, met = [model], set[int]()
    while left:
        thing = left.pop()
        if id(thing) in met:
            continue
        met.add(id(thing))
        if isinstance(thing, Fp8Weight):
            found.setdefault(thing.shape, thing)
        elif isinstance(thing, list | tuple):
            left.extend(thing)
        elif type(thing).__module__.startswith("ess.models."):
            left.extend(getattr(thing, "__dict__", {}).values())
    return list(found.values())
