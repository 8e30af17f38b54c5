"""Room for results, and tensors in the form in which backends take them."""

from __future__ import annotations

import torch
from torch import Tensor

from ess.kernels.merge import Partial


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether one of two matrices starts within the memory that the other spans."""
    low, ahead = first, second.data_ptr() - first.data_ptr()
    if ahead < 0:
        low, ahead = second, -ahead
    (count, width), (row_step, step) = low.shape, low.stride()
    return ahead < ((count - 1) * row_step + (width - 1) * step + 1) * low.itemsize


def new_partial(queries: Tensor, dim: int) -> Partial:
    count, heads, _ = queries.shape
    return Partial(empty(queries, count, heads, dim), empty(queries, count, heads))


def empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if like.is_cpu:  # naming the device, or sizes in a tuple, takes half as long again
        return torch.empty(*shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


def adjacent(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride()[-1] == 1 else tensor.contiguous()


def plain(queries: Tensor) -> Tensor:
    return adjacent(queries.float() if queries.dtype == torch.float64 else queries)


def int32(ids: Tensor) -> Tensor:
    return adjacent(ids if ids.dtype == torch.int32 else ids.to(torch.int32))
