"""New rows, keys and index queries in plain torch: norm, rotation, mix, bytes, place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.kernels.calls import Angles, KeyFinish, RowFinish
from ess.kernels.reference.keys import encode_keys, hadamard, key_records, write_keys
from ess.layout import IndexCodec, RopeStyle, RowCodec

EncodeRows = Callable[[Tensor, RowCodec, Tensor], None]


def store_rows(
    values: Tensor, codec: RowCodec, out: Tensor, places: Tensor, encode: EncodeRows
) -> None:
    kept = places >= 0
    rows = out.new_empty(int(kept.sum()), codec.row_bytes)
    encode(values[kept], codec, rows)
    out[places[kept].long()] = rows


def rotate(values: Tensor, angles: Angles, style: RopeStyle) -> Tensor:
    """Pairs (i, i + dim / 2) for half, (2 i, 2 i + 1) for interleaved, of values [n, ..., dim]."""
    shape = len(values), *[1] * (values.dim() - 2), angles.dim // 2
    cos, sin = angles.cos.view(shape), angles.sin.view(shape)
    count = angles.dim // 2
    pairs = values.reshape(*values.shape[:-1], *((2, count) if style == "half" else (count, 2)))
    axis = -2 if style == "half" else -1
    first, second = pairs.unbind(axis)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, axis).flatten(-2)


def turn_queries(queries: Tensor, angles: Angles, codec: IndexCodec) -> Tensor:
    turned = _turned(queries.float(), angles, codec)
    return turned.bfloat16() if codec.form == "fp8" else turned


def _turned(values: Tensor, angles: Angles, codec: IndexCodec) -> Tensor:
    """The first `angles.dim` numbers are rotated; then all are mixed, where the form is mixed."""
    rope, rest = values.tensor_split([angles.dim], dim=-1)
    whole = torch.cat((rotate(rope, angles, codec.rope_style), rest), -1)
    return hadamard(whole) if codec.form == "fp8" and codec.hadamard else whole


def finish_keys(
    values: Tensor, finish: KeyFinish, codec: IndexCodec, out: Tensor, row_ids: Tensor | None
) -> None:
    weight, bias, eps, angles = finish
    normed = F.layer_norm(values.float(), (codec.key_dim,), weight, bias, eps)
    turned = _turned(normed, angles, codec)
    if row_ids is not None:
        kept = row_ids >= 0
        return write_keys(out, row_ids[kept], encode_keys(turned[kept], codec), codec)
    out.copy_(key_records(encode_keys(turned, codec), codec))


def finish_rows(
    values: Tensor,
    finish: RowFinish,
    codec: RowCodec,
    out: Tensor,
    places: Tensor | None,
    encode: EncodeRows,
) -> None:
    weight, eps, angles = finish
    latent, rope = values.float().tensor_split([codec.latent_dim], dim=1)
    normed = F.rms_norm(latent, (codec.latent_dim,), weight, eps)
    whole = torch.cat((normed, rotate(rope, angles, "interleaved")), dim=1)
    if places is None:
        encode(whole, codec, out)
    else:
        store_rows(whole, codec, out, places, encode)
