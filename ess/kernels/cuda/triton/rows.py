"""Rows and keys to bytes and back: the launches, which trust what they are given."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from ess.kernels.cuda.triton.device import rows as device
from ess.kernels.cuda.triton.launch import bits, on, place
from ess.layout import SCALE_GROUP, IndexCodec, RowCodec
from ess.units import PAGE_ROWS, div_ceil

BLOCK_ROWS: Final = 8


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> None:
    """The bytes of `ess.kernels.reference.formats`, with the values float32 or bfloat16."""
    if codec.form == "f32":
        out.copy_(values.float().contiguous().view(torch.uint8))
        return
    strides = values.stride(0), out.stride(0), out.stride(0), 0
    _encode(values, _row_parts(out, codec), None, strides, True, **row_shape(codec))


def decode_rows(rows: Tensor, codec: RowCodec, out: Tensor) -> None:
    if not len(rows):
        return
    if codec.form == "f32":
        out.copy_(rows.contiguous().view(torch.float32))
        return
    shape = row_shape(codec)
    with on(rows):
        device.decode[(div_ceil(len(rows), BLOCK_ROWS), shape["GROUPS"] + 1)](
            *_row_parts(rows, codec),
            *(bits(out), len(rows), rows.stride(0), out.stride(0)),
            **{name: size for name, size in shape.items() if name != "GROUP_PADDED"},
            IS_BF16=out.dtype == torch.bfloat16,
            INTERPRETED=place(rows).interpreted,
            ROWS=BLOCK_ROWS,
        )


def encode_keys(values: Tensor, codec: IndexCodec) -> tuple[Tensor, Tensor]:
    """Bytes [n, key_dim] and scales [n] of keys in fp8."""
    codes = torch.empty(len(values), codec.key_dim, dtype=torch.uint8, device=values.device)
    scales = torch.empty(len(values), device=values.device)
    where = codes, scales.view(torch.uint8), codes
    strides = values.stride(0), codec.key_dim, 4, 0
    _encode(values, where, None, strides, codec.scale_format == "ue8m0", **_key_shape(codec))
    return codes, scales


def store_keys(values: Tensor, pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> None:
    """Keys in fp8 straight to their places in pages: encoded and written by one kernel."""
    where = pages, pages[:, PAGE_ROWS * codec.key_dim :], pages
    strides = values.stride(0), codec.key_dim, 4, pages.stride(0)
    _encode(values, where, row_ids, strides, codec.scale_format == "ue8m0", **_key_shape(codec))


def _encode(
    values: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    row_ids: Tensor | None,
    strides: tuple[int, int, int, int],
    power_of_two: bool,
    **shape: int,
) -> None:
    if not len(values):
        return
    has_tail = shape["TAIL"] > 0
    with on(values):
        device.encode[(div_ceil(len(values), BLOCK_ROWS), shape["GROUPS"] + has_tail)](
            *(bits(values), *where, values if row_ids is None else row_ids, len(values), *strides),
            **shape,
            IS_BF16=values.dtype == torch.bfloat16,
            POWER_OF_TWO=power_of_two,
            IS_PAGED=row_ids is not None,
            ROWS=BLOCK_ROWS,
        )


def _row_parts(rows: Tensor, codec: RowCodec) -> tuple[Tensor, Tensor, Tensor]:
    """Where codes, scales and the tail of a row start; the plain form is a tail alone."""
    scales_from = codec.latent_dim if codec.scale_count else 0
    return rows, rows[:, scales_from:], rows[:, scales_from + 4 * codec.scale_count :]


def row_shape(codec: RowCodec) -> dict[str, Any]:
    tail = codec.rope_dim if codec.scale_count else codec.latent_dim + codec.rope_dim
    return _shape(codec.scale_count, SCALE_GROUP, tail)


def _key_shape(codec: IndexCodec) -> dict[str, Any]:
    return _shape(1, codec.key_dim, 0)


def _shape(groups: int, group: int, tail: int) -> dict[str, int]:
    return {
        "GROUPS": groups,
        "GROUP": group,
        "GROUP_PADDED": triton.next_power_of_2(group),
        "TAIL": tail,
        "TAIL_PADDED": triton.next_power_of_2(max(1, tail)),
    }
