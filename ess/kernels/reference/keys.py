"""Groups of values to e4m3, and index keys in their pages, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ess.kernels.calls import Keys
from ess.layout import IndexCodec
from ess.units import PAGE_ROWS


def encode_groups(groups: Tensor, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes [..., size] and scales [...] of groups [..., size]."""
    amax = groups.abs().amax(dim=-1)
    scales = amax.clamp(min=1e-4) / 448.0
    if power_of_two:
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = scales.masked_fill(~amax.isfinite(), math.nan)
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(scales.isnan()[..., None], 0x7F), scales


def encode_keys(values: Tensor, codec: IndexCodec) -> Keys:
    plain = values.float()
    if codec.form == "f32":
        return Keys(plain.contiguous().view(torch.uint8), torch.ones_like(plain[:, 0]))
    return Keys(*encode_groups(plain, power_of_two=codec.scale_format == "ue8m0"))


def key_records(keys: Keys, codec: IndexCodec) -> Tensor:
    """The bytes of each key, then its scale where the form has one."""
    if not codec.scale_bytes:
        return keys.values
    return torch.cat((keys.values, keys.scales[:, None].contiguous().view(torch.uint8)), 1)


def write_keys(pages: Tensor, row_ids: Tensor, keys: Keys, codec: IndexCodec) -> None:
    """Where rows share a key, those of the last rows of units; the others are dropped."""
    if codec.unit > 1:
        last = row_ids % codec.unit == codec.unit - 1
        row_ids, keys = row_ids[last], Keys(*(part[last] for part in keys))
    page, offset = _places(row_ids, codec)
    values, scales = _page_parts(pages, codec)
    values[page, offset] = keys.values
    if codec.scale_bytes:
        scales[page, offset] = keys.scales[:, None].contiguous().view(torch.uint8)


def read_keys(pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> Keys:
    page, offset = _places(row_ids, codec)
    values, scales = _page_parts(pages, codec)
    if not codec.scale_bytes:
        return Keys(values[page, offset], torch.ones(len(row_ids), device=pages.device))
    return Keys(values[page, offset], scales[page, offset].view(torch.float32)[:, 0])


def page_values(pages: Tensor, codec: IndexCodec) -> Tensor:
    """All keys of whole pages [page, page_bytes] as they were encoded: float32 [keys, dim]."""
    values, scales = _page_parts(pages, codec)
    if not codec.scale_bytes:
        return values.contiguous().view(torch.float32).view(-1, codec.key_dim)
    wide = values.contiguous().view(torch.float8_e4m3fn).float()
    return (wide * scales.contiguous().view(torch.float32)).view(-1, codec.key_dim)


def _places(row_ids: Tensor, codec: IndexCodec) -> tuple[Tensor, Tensor]:
    ids = row_ids.long()
    return ids // PAGE_ROWS, ids % PAGE_ROWS // codec.unit


def _page_parts(pages: Tensor, codec: IndexCodec) -> tuple[Tensor, Tensor]:
    """Views [page, keys, value_bytes] and [page, keys, scale_bytes] of the two blocks of every
    page."""
    count = PAGE_ROWS // codec.unit
    split = count * codec.value_bytes
    return (
        pages[:, :split].view(len(pages), count, codec.value_bytes),
        pages[:, split:].view(len(pages), count, codec.scale_bytes),
    )


def hadamard(values: Tensor) -> Tensor:
    """The transform step by step: sums and differences at distances 1, 2, 4, ..."""
    size, stride, shape = values.shape[-1], 1, values.shape
    values = values.float()
    while stride < size:
        low, high = values.reshape(*shape[:-1], size // (2 * stride), 2, stride).unbind(-2)
        values = torch.stack([low + high, low - high], dim=-2).reshape(shape)
        stride *= 2
    return values * math.pow(size, -0.5)
