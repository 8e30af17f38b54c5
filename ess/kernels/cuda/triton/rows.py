"""Rows and keys to bytes and back: the launches, which trust what they are given."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from ess.kernels.cuda.triton.device import rows as device
from ess.kernels.cuda.triton.launch import FUSED, bits, on, place
from ess.layout import SCALE_GROUP, IndexCodec, RowCodec
from ess.units import div_ceil

BLOCK_ROWS: Final = 8


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> None:
    """The bytes of `ess.kernels.reference.formats`, with the values float32 or bfloat16."""
    steps = _Steps(out.stride(0), out.stride(0), 0)
    _encode(values, _row_parts(out, codec), None, steps, 0, **row_shape(codec))


def store_rows(values: Tensor, codec: RowCodec, out: Tensor, places: Tensor) -> None:
    """Rows straight to their slots: a page of one row each."""
    steps = _Steps(0, 0, out.stride(0))
    _encode(values, _row_parts(out, codec), places, steps, 1, **row_shape(codec))


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
            **{name: shape[name] for name in ("GROUPS", "GROUP", "TAIL", "TAIL_PADDED")},
            IS_BF16=out.dtype == torch.bfloat16,
            INTERPRETED=place(rows).interpreted,
            ROWS=BLOCK_ROWS,
            **FUSED,
        )


def encode_keys(values: Tensor, codec: IndexCodec) -> tuple[Tensor, Tensor]:
    """Bytes [n, key_dim] and scales [n] of keys in fp8."""
    codes = torch.empty(len(values), codec.key_dim, dtype=torch.uint8, device=values.device)
    scales = torch.empty(len(values), device=values.device)
    where = codes, scales.view(torch.uint8), codes
    _encode(values, where, None, _Steps(codec.key_dim, 4, 0), 0, **key_shape(codec))
    return codes, scales


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, depth] and scales [n, depth / 128] of values; the depth is a multiple of 128."""
    count, depth = values.shape
    codes = torch.empty(count, depth, dtype=torch.uint8, device=values.device)
    scales = torch.empty(count, depth // SCALE_GROUP, device=values.device)
    where = codes, scales.view(torch.uint8), codes
    shape = _shape(scales.shape[1], SCALE_GROUP, 0)
    _encode(values, where, None, _Steps(depth, 4 * scales.shape[1], 0), 0, **shape)
    return codes, scales


class _Steps(NamedTuple):
    """Bytes from a row's codes to the next one's, from its scales, and from page to page."""

    codes: int
    scales: int
    page: int


def _encode(
    values: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    places: Tensor | None,
    steps: _Steps,
    page: int,
    **shape: int | bool,
) -> None:
    if not len(values):
        return
    parts = shape["GROUPS"] + (shape["TAIL"] > 0)
    with on(values):
        device.encode[(div_ceil(len(values), BLOCK_ROWS), parts)](
            *(bits(values), *where, values if places is None else places),
            *(len(values), values.stride(0), *steps),
            **shape,
            IS_BF16=values.dtype == torch.bfloat16,
            PAGE=page,
            ROWS=BLOCK_ROWS,
            **FUSED,
        )


def _row_parts(rows: Tensor, codec: RowCodec) -> tuple[Tensor, Tensor, Tensor]:
    """Where codes, scales and the tail of a row start; the plain form is a tail alone."""
    scales_from = codec.latent_dim if codec.scale_count else 0
    return rows, rows[:, scales_from:], rows[:, scales_from + 4 * codec.scale_count :]


def row_shape(codec: RowCodec) -> dict[str, Any]:
    tail = codec.rope_dim if codec.scale_count else codec.latent_dim + codec.rope_dim
    shape = _shape(codec.scale_count, SCALE_GROUP, tail)
    return shape | {"POWER_OF_TWO": True, "TAIL_IS_F32": codec.form == "f32"}


def key_shape(codec: IndexCodec) -> dict[str, Any]:
    if codec.form == "f32":
        return _shape(0, SCALE_GROUP, codec.key_dim) | {"TAIL_IS_F32": True}
    is_rounded = codec.scale_format == "ue8m0"
    return _shape(1, codec.key_dim, 0) | {"POWER_OF_TWO": is_rounded}


def _shape(groups: int, group: int, tail: int) -> dict[str, Any]:
    return {
        "POWER_OF_TWO": False,
        "TAIL_IS_F32": False,
        "GROUPS": groups,
        "GROUP": group,
        "GROUP_PADDED": triton.next_power_of_2(group),
        "TAIL": tail,
        "TAIL_PADDED": triton.next_power_of_2(max(1, tail)),
    }
