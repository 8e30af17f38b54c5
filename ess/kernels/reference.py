"""Every op in plain torch: slow, obvious, the truth that other backends are held to.

Attention and index logits are computed in float64 and rounded to float32 at the end, so that the
order of a sum is no part of the answer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import (
    COUNTS,
    PLAIN,
    SINGLE,
    check_attention,
    check_index,
    check_keys,
    check_pages,
    check_rows,
    require,
    require_ids,
)
from ess.kernels.merge import Partial, merge
from ess.layout import SCALE_GROUP, IndexCodec, RowCodec
from ess.units import PAGE_ROWS

__all__ = [
    "Keys",
    "decode_rows",
    "encode_keys",
    "encode_rows",
    "hadamard",
    "implementation",
    "index_logits",
    "merge",
    "read_keys",
    "sparse_attention",
    "top_k",
    "write_keys",
]


class Keys(NamedTuple):
    """Encoded index keys: bytes of values [n, value_bytes], float32 scales [n], 1 where plain."""

    values: Tensor
    scales: Tensor


def implementation() -> str:
    return "torch"


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Values [n, latent + rope], float32 or bfloat16, into rows [n, row_bytes]."""
    check_rows(values, codec, out)
    if codec.form != "fp8":
        plain = values.float() if codec.form == "f32" else _narrow(values)
        return out.copy_(plain.contiguous().view(torch.uint8))
    latent, rope = values.tensor_split([codec.latent_dim], dim=1)
    codes, scales = _encode_groups(latent.float().reshape(_groups_shape(latent, codec)), True)
    parts = codes.flatten(1), scales, _narrow(rope).contiguous()
    return out.copy_(torch.cat([part.view(torch.uint8) for part in parts], dim=1))


def decode_rows(rows: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16."""
    check_rows(out, codec, rows)
    if not len(rows):
        return out
    if codec.form != "fp8":
        plain = rows.contiguous().view(torch.float32 if codec.form == "f32" else torch.bfloat16)
        return out.copy_(_narrow(plain) if out.dtype == torch.bfloat16 else plain)
    ends = [codec.latent_dim, codec.latent_dim + 4 * codec.scale_count]
    codes, scales, rope = (part.contiguous() for part in rows.tensor_split(ends, dim=1))
    groups = codes.view(torch.float8_e4m3fn).float().view(_groups_shape(rows, codec))
    latent = (groups * scales.view(torch.float32)[..., None]).flatten(1)
    out[:, : codec.latent_dim] = _narrow(latent) if out.dtype == torch.bfloat16 else latent
    out[:, codec.latent_dim :] = rope.view(torch.bfloat16)
    return out


def _groups_shape(rows: Tensor, codec: RowCodec) -> tuple[int, int, int]:
    return len(rows), codec.scale_count, SCALE_GROUP


def _narrow(values: Tensor) -> Tensor:
    """To bfloat16. Torch writes a NaN in several ways; here it is always 0x7FC0."""
    if values.dtype == torch.bfloat16:
        return values
    bits = values.to(torch.bfloat16).view(torch.int16)
    return bits.masked_fill(values.isnan(), 0x7FC0).view(torch.bfloat16)


def _encode_groups(groups: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    amax = groups.abs().amax(dim=-1)
    scales = amax.clamp(min=1e-4) / 448.0
    if power_of_two:
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = scales.masked_fill(~amax.isfinite(), math.nan)
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(scales.isnan()[..., None], 0x7F), scales


def encode_keys(values: Tensor, codec: IndexCodec) -> Keys:
    """Keys [n, key_dim], float32 or bfloat16; the float32 form keeps them, with scale 1."""
    require("values", values, (None, codec.key_dim), PLAIN)
    plain = values.float()
    if codec.form == "f32":
        return Keys(plain.contiguous().view(torch.uint8), torch.ones_like(plain[:, 0]))
    return Keys(*_encode_groups(plain, codec.scale_format == "ue8m0"))


def write_keys(pages: Tensor, row_ids: Tensor, keys: Keys, codec: IndexCodec) -> None:
    """Into pages [page, page_bytes]: 64 times the bytes of a value, then 64 scales."""
    check_pages(pages, codec)
    check_keys(*keys, row_ids, codec)
    page, offset = _places(row_ids, pages)
    values, scales = _page_parts(pages, codec)
    values[page, offset] = keys.values
    if codec.scale_bytes:
        scales[page, offset] = keys.scales[:, None].contiguous().view(torch.uint8)


def read_keys(pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> Keys:
    check_pages(pages, codec)
    require("row_ids", row_ids, (None,), COUNTS)
    page, offset = _places(row_ids, pages)
    values, scales = _page_parts(pages, codec)
    if not codec.scale_bytes:
        return Keys(values[page, offset], torch.ones(len(row_ids), device=pages.device))
    return Keys(values[page, offset], scales[page, offset].view(torch.float32)[:, 0])


def _places(row_ids: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    _require_in_range("row_ids", row_ids, low=0, limit=len(pages) * PAGE_ROWS)
    return row_ids.long() // PAGE_ROWS, row_ids.long() % PAGE_ROWS


def _page_parts(pages: Tensor, codec: IndexCodec) -> tuple[Tensor, Tensor]:
    """Views [page, 64, value_bytes] and [page, 64, scale_bytes] of the two blocks of every page."""
    split = PAGE_ROWS * codec.value_bytes
    return (
        pages[:, :split].view(len(pages), PAGE_ROWS, codec.value_bytes),
        pages[:, split:].view(len(pages), PAGE_ROWS, codec.scale_bytes),
    )


def _require_in_range(name: str, ids: Tensor, *, low: int, limit: int) -> None:
    if ids.numel():
        require_ids(name, int(ids.min()), int(ids.max()), low=low, limit=limit)


def hadamard(values: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis; its own inverse. Float32 inside."""
    size, stride, shape = values.shape[-1], 1, values.shape
    if size < 1 or size & (size - 1):
        raise BadInput(f"a Hadamard transform needs a power of two, got {size}")
    values = values.float()
    while stride < size:
        low, high = values.reshape(*shape[:-1], size // (2 * stride), 2, stride).unbind(-2)
        values = torch.stack([low + high, low - high], dim=-2).reshape(shape)
        stride *= 2
    return values * torch.tensor(size**-0.5, device=values.device)


def sparse_attention(
    queries: Tensor, rows: Tensor, slots: Tensor, *, latent_dim: int, scale: float
) -> Partial:
    """Queries [q, heads, dim] over the rows [slot, dim] that slots [q, k] name; -1 is nobody.

    The key is the whole row, the value its first `latent_dim` numbers. Rows that are not named are
    not read into the answer, whatever they hold. A slot named twice counts twice.
    """
    check_attention(queries, rows, slots, latent_dim)
    _require_in_range("slots", slots, low=-1, limit=len(rows))
    count, heads = queries.shape[:2]
    out = torch.empty(count, heads, latent_dim, device=rows.device)
    lse = torch.empty(count, heads, device=rows.device)
    for q in range(count):
        keys = rows[slots[q, slots[q] >= 0].long()].double()
        logits = queries[q].double() @ keys.T * scale
        total = logits.logsumexp(dim=-1)
        lse[q] = total
        out[q] = (logits - total[:, None]).exp() @ keys[:, :latent_dim]
    return Partial(out, lse)


def index_logits(
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    codec: IndexCodec,
) -> Tensor:
    """Logits [q, 64 * table width]: key scale * sum over heads of weight * relu(query . key).

    Query q sees the first lengths[q] positions of the pages in page_table[q]; -inf is beyond them.
    Query scales belong in the weights.
    """
    check_pages(pages, codec)
    check_index(queries, weights, page_table, lengths, codec)
    width = page_table.shape[1] * PAGE_ROWS
    _require_in_range("lengths", lengths, low=0, limit=width + 1)
    logits = queries.new_full((len(queries), width), -math.inf, dtype=torch.float32)
    for q, length in enumerate(lengths.tolist()):
        position = torch.arange(length, device=pages.device)
        page = page_table[q, position // PAGE_ROWS].long()
        keys = read_keys(pages, page * PAGE_ROWS + position % PAGE_ROWS, codec)
        dots = queries[q].double() @ _key_values(keys, codec).T
        total = (weights[q].double()[:, None] * dots.relu()).sum(dim=0)
        logits[q, :length] = (total * keys.scales.double()).float()
    return logits


def _key_values(keys: Keys, codec: IndexCodec) -> Tensor:
    """Without their scales."""
    form = torch.float32 if codec.form == "f32" else torch.float8_e4m3fn
    return keys.values.view(form).double()


def top_k(logits: Tensor, lengths: Tensor, *, k: int) -> Tensor:
    """The positions [q, k] of the k greatest of the first lengths[q] logits, ascending, then -1.

    Equal logits go to the lowest position first. NaN counts as the greatest, so that it is seen.
    """
    require("logits", logits, (None, None), SINGLE)
    require("lengths", lengths, (logits.shape[0],), COUNTS)
    if k < 1:
        raise BadInput(f"k is {k}, must be positive")
    count, width = logits.shape
    _require_in_range("lengths", lengths, low=0, limit=width + 1)
    beyond = torch.arange(width, device=logits.device) >= lengths[:, None]
    ranked = logits.masked_fill(beyond, -math.inf).sort(dim=-1, descending=True, stable=True)
    chosen = ranked.indices[:, :k].masked_fill(
        torch.arange(min(k, width), device=logits.device) >= lengths[:, None], width
    )
    ascending = chosen.sort(dim=-1).values.to(torch.int32)
    selection = ascending.new_full((count, k), -1)
    selection[:, : min(k, width)] = ascending.masked_fill(ascending == width, -1)
    return selection
