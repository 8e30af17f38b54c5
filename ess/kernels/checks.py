"""Checks of tensors, in sentences that name the tensor and the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.layout import SCALE_GROUP
from ess.units import div_ceil

BYTES: Final = (torch.uint8,)
INT32: Final = (torch.int32,)
COUNTS: Final = (torch.int32, torch.int64)
SINGLE: Final = (torch.float32,)
FLOATS: Final = (torch.float32, torch.bfloat16)
CODED: Final = torch.float8_e4m3fn
QUERIES: Final = (*FLOATS, torch.float64, CODED)


def require(
    name: str, tensor: Any, shape: Sequence[int | None] | None, dtypes: Sequence[torch.dtype]
) -> None:
    """`None` in the shape is any size, `None` as the shape any shape."""
    if not isinstance(tensor, Tensor):
        raise BadInput(f"{name} is {type(tensor).__name__}, must be a tensor")
    if shape is not None and not fits(tensor.shape, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise BadInput(f"{name} has shape {tuple(tensor.shape)}, must be ({sizes})")
    if tensor.dtype not in dtypes:
        names, one_of = ", ".join(map(str, dtypes)), "one of " if len(dtypes) > 1 else ""
        raise BadInput(f"{name} has type {tensor.dtype}, must be {one_of}{names}")


def fits(got: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(got) != len(wanted):
        return False
    for axis, size in enumerate(wanted):  # noqa: SIM110 (`all` would take three times as long)
        if size is not None and got[axis] != size:
            return False
    return True


def check_products(
    tokens: Tensor, ends: Tensor, weights: Tensor, scales: Tensor | None, out: Tensor | None
) -> None:
    require("tokens", tokens, (None, None), FLOATS)
    require("weights", weights, (None, None, tokens.shape[1]), (*FLOATS, CODED))
    experts, width, depth = weights.shape
    if not depth:
        raise BadInput(f"tokens of shape {tuple(tokens.shape)} have no depth")
    require("ends", ends, (experts,), INT32)
    require_dense("weights", weights)
    if out is not None:
        require("out", out, (len(tokens), width), FLOATS)
        require_adjacent("out", out)
    if (weights.dtype == CODED) != (scales is not None):
        raise BadInput(
            f"weights of {weights.dtype} with {'no scales' if scales is None else 'scales'}"
        )
    if scales is not None:
        blocks = div_ceil(width, SCALE_GROUP), div_ceil(depth, SCALE_GROUP)
        require("scales", scales, (experts, *blocks), SINGLE)
        require_dense("scales", scales)


def require_ends(ends: Sequence[int], *, count: int) -> None:
    """Experts' tokens lie one behind the other, among `count`."""
    for expert, (start, end) in enumerate(pairwise((0, *ends))):
        if not start <= end <= count:
            raise BadInput(f"ends[{expert}] is {end}, outside {start}..{count}")


def require_ids(name: str, least: int, greatest: int, *, low: int, limit: int) -> None:
    """Ids whose least and greatest are given lie in low..limit-1."""
    if least < low or greatest >= limit:
        raise BadInput(f"{name} holds {least}..{greatest}, outside {low}..{limit - 1}")


def require_within(name: str, ids: Tensor, *, low: int, limit: int) -> None:
    """Looks at the ids, so where they lie on a device this waits for it."""
    if ids.numel():
        least, greatest = torch.stack(ids.aminmax()).tolist()
        require_ids(name, least, greatest, low=low, limit=limit)


def require_adjacent(name: str, tensor: Tensor) -> None:
    step = tensor.stride()[-1]
    if step != 1 and tensor.numel():
        raise BadInput(f"{name} steps {step} elements within a row: copy it")


def require_dense(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise BadInput(f"{name} with strides {tuple(tensor.stride())} has gaps: copy it")
