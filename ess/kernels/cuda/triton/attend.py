"""Sparse attention and merge: the launches, which trust what they are given.

Nothing here looks at a value on the device, so all of it may be captured in a graph, and a caller
that keeps the scratch may replay it with other lists.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.cuda.triton.device import attend as device
from ess.kernels.cuda.triton.device import partials
from ess.kernels.cuda.triton.launch import bits, on, place
from ess.kernels.cuda.triton.shapes import Shape, candidates
from ess.kernels.merge import Partial
from ess.layout import RowCodec
from ess.units import div_ceil

DOT_MIN: Final = 16
LIST_BLOCK: Final = 1024


class Lists(NamedTuple):
    """Names without gaps [q, width] and how many there are of each [q], both int32."""

    named: Tensor
    counts: Tensor


class _Cut(NamedTuple):
    """What runs apart, and on how much of the device."""

    splits: int
    split_keys: int
    spare_sms: int
    adds: bool


def close_up(slots: Tensor) -> Lists:
    """Slots [q, width], int32, with -1 anywhere."""
    count, width = slots.shape
    named = torch.empty_like(slots, memory_format=torch.contiguous_format)
    counts = torch.empty(count, dtype=torch.int32, device=slots.device)
    if count:
        with on(slots):
            device.close_up[(count,)](slots, named, counts, width, slots.stride(0), LIST_BLOCK)
    return Lists(named, counts)


def in_half(query_dtype: torch.dtype, codec: RowCodec) -> bool:
    """Products in bfloat16 where queries and rows are no wider by nature."""
    return query_dtype == torch.bfloat16 and codec.form != "f32"


def attend_lists(
    queries: Tensor,
    rows: Tensor,
    lists: Lists,
    codec: RowCodec,
    *,
    scale: float,
    into: Partial,
    placed: Tensor | None = None,
    spare_sms: int = 0,
    split_keys: int | None = None,
    adds: bool = False,
    shape: Shape | None = None,
) -> Partial:
    """Attention over lists that are closed up, on a grid that leaves `spare_sms` alone.

    With `adds`, `into` holds a partial over other rows and gets the joint one, in one pass over it
    where attention apart and a merge take two; a query that names nothing is not touched.

    `split_keys` cuts every list into parts of so many names that run apart and are joined after:
    for batches too small to fill the device. The cut is part of the arithmetic: the same rows give
    the same bits for the same cut, whatever else is in the batch. `shape` is for
    measurements: the bits of another shape differ.
    """
    count, heads = queries.shape[:2]
    width = lists.named.shape[1]
    if adds and split_keys is not None:
        raise BadInput(f"lists cut by split_keys {split_keys} cannot be added to a partial")
    if adds and not width:
        return into
    if not count or not width:
        into.out.zero_()
        into.lse.fill_(float("-inf"))
        return into
    if shape is None:
        is_half = in_half(queries.dtype, codec)
        shape = candidates(form=codec.form, heads=heads, is_half=is_half)[0]
    split_keys = split_keys or width
    cut = _Cut(div_ceil(width, split_keys), split_keys, spare_sms, adds)
    parts = into if cut.splits == 1 else _parts(queries, cut.splits, codec.latent_dim)
    with on(queries):
        _launch(queries, rows, lists, codec, scale, placed, parts, cut, shape)
        if cut.splits > 1:
            dim = codec.latent_dim
            partials.join[(count, heads)](
                *parts, lists.counts, *into, heads, *cut[:2], dim, _padded(dim)
            )
    return into


def _parts(queries: Tensor, splits: int, dim: int) -> Partial:
    shape = queries.shape[0], splits, queries.shape[1]
    device = queries.device
    return Partial(torch.empty(*shape, dim, device=device), torch.empty(shape, device=device))


def _launch(
    queries: Tensor,
    rows: Tensor,
    lists: Lists,
    codec: RowCodec,
    scale: float,
    placed: Tensor | None,
    parts: Partial,
    cut: _Cut,
    shape: Shape,
) -> None:
    where, heads = place(queries), queries.shape[1]
    tasks = len(queries) * cut.splits * div_ceil(heads, shape.heads)
    elsewhere = rows if placed is None else placed
    device.attend[(where.programs(tasks, spare_sms=cut.spare_sms),)](
        *(bits(queries), rows, *lists, *parts),
        *(scale, elsewhere.data_ptr() - rows.data_ptr(), rows.stride(0), elsewhere.stride(0)),
        *(*queries.stride()[:2], len(queries), heads, lists.named.shape[1], *cut[:2]),
        **constants(codec, query_dtype=queries.dtype, interpreted=where.interpreted),
        HEADS=shape.heads,
        KEYS=shape.keys,
        ADDS=cut.adds,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def constants(
    codec: RowCodec, *, query_dtype: torch.dtype, interpreted: bool
) -> dict[str, int | bool | str]:
    """What the kernel is compiled for, apart from its block sizes."""
    size = 4 if codec.form == "f32" else 2
    before = codec.latent_dim + 4 * codec.scale_count
    return {
        "DIM": codec.latent_dim,
        "DIM_PADDED": _padded(codec.latent_dim),
        "ROPE": codec.rope_dim,
        "ROPE_PADDED": _padded(codec.rope_dim),
        "ROPE_FROM": before if codec.form == "fp8" else size * codec.latent_dim,
        "FORM": codec.form,
        "QUERY_IS_BF16": query_dtype == torch.bfloat16,
        "IN_BF16": in_half(query_dtype, codec) and not interpreted,
        "INTERPRETED": interpreted,
        "PRECISION": "ieee",
    }


def _padded(size: int) -> int:
    return max(DOT_MIN, int(triton.next_power_of_2(size)))


def merge_into(first: Partial, second: Partial, into: Partial) -> None:
    """All dense; `into` may be one of the sides."""
    width = into.out.shape[-1]
    if into.lse.numel():
        with on(into.lse):
            partials.merge[(into.lse.numel(),)](
                *first,
                *second,
                *into,
                width,
                triton.next_power_of_2(width),
                enable_fp_fusion=False,
            )
