"""New rows, keys and index queries, finished and put where they belong: the launches."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from ess.kernels.calls import Angles, KeyFinish, RowFinish
from ess.kernels.cuda.triton.device import finish as device
from ess.kernels.cuda.triton.launch import UNFUSED, bits, on
from ess.layout import IndexCodec, RowCodec
from ess.units import PAGE_ROWS, div_ceil

LINES: Final = 8
NUMBERS: Final = 1024


def hadamard(values: Tensor) -> Tensor:
    """Transforms the last axis, which is dense and has a power of two as size."""
    lines = values.reshape(-1, 1, values.shape[-1])
    out = torch.empty(values.shape, device=values.device)
    _turn(lines, None, 0, True, out, lines.shape[-1].bit_length() - 1)
    return out


def turn_queries(queries: Tensor, angles: Angles, codec: IndexCodec) -> Tensor:
    is_fp8 = codec.form == "fp8"
    dtype = torch.bfloat16 if is_fp8 else torch.float32
    out = torch.empty(queries.shape, dtype=dtype, device=queries.device)
    _turn(queries, angles, angles.dim, codec.rope_style == "half", out, _levels(codec))
    return out


def _turn(
    lines: Tensor, angles: Angles | None, rope: int, is_half: bool, out: Tensor, levels: int
) -> None:
    tokens, heads, dim = lines.shape
    if not tokens:
        return
    cos, sin = (lines, lines) if angles is None else (angles.cos, angles.sin)
    padded = int(triton.next_power_of_2(dim))
    each = max(1, min(LINES, NUMBERS // padded))
    with on(lines):
        device.turn[(div_ceil(tokens * heads, each),)](
            *(bits(lines), cos, sin, bits(out), tokens * heads, heads),
            *(*lines.stride()[:2], float(dim**-0.5)),
            DIM=dim,
            PADDED=padded,
            ROPE=rope,
            IS_HALF=is_half,
            LEVELS=levels,
            IS_BF16=lines.dtype == torch.bfloat16,
            OUT_IS_BF16=out.dtype == torch.bfloat16,
            LINES=each,
            **UNFUSED,
        )


def _levels(codec: IndexCodec) -> int:
    """How deep keys are mixed; those of the plain form are not."""
    is_mixed = codec.form == "fp8" and codec.hadamard
    return codec.key_dim.bit_length() - 1 if is_mixed else 0


def finish_keys(
    values: Tensor, finish: KeyFinish, codec: IndexCodec, out: Tensor, row_ids: Tensor | None
) -> None:
    if not len(values):
        return
    page, steps = PAGE_ROWS, (codec.value_bytes, codec.scale_bytes, out.stride(0))
    if row_ids is None:
        page, steps = 0, (out.stride(0), out.stride(0), 0)
    scales = out[:, max(1, page) * codec.value_bytes :]
    weight, bias, eps, angles = finish
    with on(values):
        device.finish_keys[(div_ceil(len(values), LINES),)](
            *(bits(values), weight, bias, angles.cos, angles.sin, out, scales),
            *(values if row_ids is None else row_ids, len(values), values.stride(0), *steps),
            *(eps, codec.key_dim**-0.5),
            **key_shape(codec, rope=angles.dim),
            IS_BF16=values.dtype == torch.bfloat16,
            PAGE=page,
            LINES=LINES,
            **UNFUSED,
        )


def key_shape(codec: IndexCodec, *, rope: int) -> dict[str, Any]:
    return {
        "DIM": codec.key_dim,
        "PADDED": triton.next_power_of_2(codec.key_dim),
        "ROPE": rope,
        "IS_HALF": codec.rope_style == "half",
        "LEVELS": _levels(codec),
        "IS_FP8": codec.form == "fp8",
        "POWER_OF_TWO": codec.scale_format == "ue8m0",
    }


def finish_rows(
    values: Tensor, finish: RowFinish, codec: RowCodec, out: Tensor, places: Tensor | None
) -> None:
    if not len(values):
        return
    weight, eps, angles = finish
    with on(values):
        device.finish_rows[(len(values),)](
            *(
                bits(values),
                weight,
                angles.cos,
                angles.sin,
                out,
                values if places is None else places,
            ),
            *(values.stride(0), out.stride(0), eps),
            **row_shape(codec),
            IS_BF16=values.dtype == torch.bfloat16,
            HAS_PLACES=places is not None,
            **UNFUSED,
        )


def row_shape(codec: RowCodec) -> dict[str, Any]:
    before = codec.latent_dim + 4 * codec.scale_count
    size = 4 if codec.form == "f32" else 2
    return {
        "DIM": codec.latent_dim,
        "PADDED": triton.next_power_of_2(codec.latent_dim),
        "ROPE": codec.rope_dim,
        "ROPE_PADDED": triton.next_power_of_2(max(1, codec.rope_dim)),
        "ROPE_FROM": before if codec.form == "fp8" else size * codec.latent_dim,
        "FORM": codec.form,
    }
