"""Checks of tensors, in sentences that name the tensor and the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.layout import SCALE_GROUP, IndexCodec, RowCodec
from ess.units import div_ceil

if TYPE_CHECKING:
    from ess.kernels.calls import Angles

BYTES: Final = (torch.uint8,)
INT32: Final = (torch.int32,)
COUNTS: Final = (torch.int32, torch.int64)
SINGLE: Final = (torch.float32,)
FLOATS: Final = (torch.float32, torch.bfloat16)
CODED: Final = torch.float8_e4m3fn
QUERIES: Final = (*FLOATS, torch.float64, CODED)


def require_readable(codec: RowCodec, backend: str) -> None:
    if codec.form == "opaque":
        raise BadInput("an opaque row is read, written and attended by its owner only")
    if codec.form == "fp8_64" and backend == "cuda":
        raise BadInput("no kernel of a device reads or writes rows of the form fp8_64")


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


def require_ends(ends: Sequence[int], *, count: int, begin: int) -> None:
    """Experts' tokens lie one behind the other from `begin` on, among `count`."""
    if begin < 0:
        raise BadInput(f"begin is {begin}, must not be negative")
    for expert, (start, end) in enumerate(pairwise((begin, *ends))):
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


def require_single(codec: IndexCodec) -> IndexCodec:
    """Refuses codecs whose rows share a key, for ops that cannot read such keys."""
    if codec.unit > 1:
        raise BadInput(f"codec has a key for each {codec.unit} rows, and this op one for each row")
    return codec


def check_threads(threads: int) -> None:
    if threads < 1:
        raise BadInput(f"threads is {threads}, must be positive")


def check_linear(values: Tensor, weights: Tensor, scales: Tensor, out: Tensor | None) -> None:
    require("values", values, (None, None), FLOATS)
    require("weights", weights, (None, values.shape[1]), (CODED,))
    width, depth = weights.shape
    if not depth:
        raise BadInput(f"values of shape {tuple(values.shape)} have no depth")
    blocks = div_ceil(width, SCALE_GROUP), div_ceil(depth, SCALE_GROUP)
    require("scales", scales, blocks, SINGLE)
    require_dense("weights", weights)
    require_dense("scales", scales)
    if out is not None:
        require("out", out, (len(values), width), FLOATS)
        require_adjacent("out", out)


def check_angles(angles: Angles, count: int, *, low: int, high: int) -> None:
    """Checks that there are angles for `count` tokens, and that they turn `low` to `high`
    numbers."""
    for name, part in zip(("angles.cos", "angles.sin"), angles, strict=True):
        require(name, part, (count, angles.cos.shape[1]), SINGLE)
        require_dense(name, part)
    if not low <= angles.dim <= high:
        raise BadInput(f"angles turn {angles.dim} numbers, outside {low}..{high}")


def check_shared(count: int, queries_per_request: int) -> None:
    """Queries of a request lie beside each other, as many of each."""
    if queries_per_request < 1 or count % queries_per_request:
        raise BadInput(f"{count} queries are not {queries_per_request} of each request")
