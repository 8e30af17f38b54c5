"""Every op in plain torch: slow, obvious, the truth that other backends are held to.

Attention and index logits are computed in float64 and rounded to float32 at the end, so that the
order of a sum is no part of the answer.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import (
    COUNTS,
    PLAIN,
    SINGLE,
    check_attend,
    check_attention,
    check_index,
    check_keys,
    check_pages,
    check_products,
    check_rows,
    check_top_k,
    require,
    require_ends,
    require_ids,
)
from ess.kernels.merge import Partial, merge
from ess.layout import SCALE_GROUP, IndexCodec, RowCodec
from ess.units import PAGE_ROWS

__all__ = [
    "Keys",
    "attend",
    "decode_rows",
    "encode_keys",
    "encode_rows",
    "expert_products",
    "hadamard",
    "has_stages",
    "implementation",
    "index_logits",
    "index_top_k",
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


def has_stages() -> bool:
    """Whether this set has `ess.kernels.cpu.stage`; without it stages run op by op in torch."""
    return False


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
    partial = _new_partial(queries, latent_dim)
    for q in range(len(queries)):
        keys = rows[slots[q, slots[q] >= 0].long()]
        partial.out[q], partial.lse[q] = _attend_one(queries[q], keys, latent_dim, scale)
    return partial


def attend(
    queries: Tensor,
    rows: Tensor,
    slots: Tensor,
    codec: RowCodec,
    *,
    scale: float,
    placed: Tensor | None = None,
    into: Partial | None = None,
    threads: int = 1,
) -> Partial:
    """`sparse_attention` over encoded rows [slot, row_bytes], some of them elsewhere.

    A slot of -2 or less names row -2 - slot of `placed`. `into` is written and returned.
    """
    check_attend(queries, rows, slots, codec, placed, into)
    low = -1 if placed is None else -1 - len(placed)
    _require_in_range("slots", slots, low=low, limit=len(rows))
    partial = into or _new_partial(queries, codec.latent_dim)
    elsewhere = rows if placed is None else placed
    for q in range(len(queries)):
        slot = slots[q, slots[q] != -1].long()
        chosen = rows.new_empty(len(slot), codec.row_bytes)
        chosen[slot >= 0], chosen[slot < 0] = rows[slot[slot >= 0]], elsewhere[-2 - slot[slot < 0]]
        keys = torch.empty(len(slot), codec.latent_dim + codec.rope_dim, device=rows.device)
        decode_rows(chosen, codec, keys)
        partial.out[q], partial.lse[q] = _attend_one(queries[q], keys, codec.latent_dim, scale)
    return partial


def _new_partial(queries: Tensor, latent_dim: int) -> Partial:
    count, heads = queries.shape[:2]
    device = queries.device
    out = torch.empty(count, heads, latent_dim, device=device)
    return Partial(out, torch.empty(count, heads, device=device))


def _attend_one(
    query: Tensor, keys: Tensor, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Query [heads, dim] over keys [n, dim]."""
    logits = query.double() @ keys.double().T * scale
    out = logits.softmax(dim=-1) @ keys[:, :latent_dim].double()
    return out.float(), logits.logsumexp(dim=-1).float()


def index_logits(
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    codec: IndexCodec,
    *,
    out: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """Logits [q, 64 * table width]: key scale * sum over heads of weight * relu(query . key).

    Query q sees the first lengths[q] positions of the pages in page_table[q]; -inf is beyond them.
    Query scales belong in the weights.
    """
    check_pages(pages, codec)
    check_index(queries, weights, page_table, lengths, codec)
    width = page_table.shape[1] * PAGE_ROWS
    _require_in_range("lengths", lengths, low=0, limit=width + 1)
    seen = torch.arange(0, width, PAGE_ROWS, device=pages.device) < lengths[:, None]
    _require_in_range("page_table", page_table[seen], low=0, limit=len(pages))
    if out is not None:
        require("out", out, (len(queries), width), SINGLE)
    logits = torch.full((len(queries), width), -math.inf, device=pages.device)
    for q, length in enumerate(lengths.tolist()):
        position = torch.arange(length, device=pages.device)
        page = page_table[q, position // PAGE_ROWS].long()
        keys = read_keys(pages, page * PAGE_ROWS + position % PAGE_ROWS, codec)
        dots = queries[q].double() @ _key_values(keys, codec).T
        total = (weights[q].double()[:, None] * dots.relu()).sum(dim=0)
        logits[q, :length] = (total * keys.scales.double()).float()
    return logits if out is None else out.copy_(logits)


def _key_values(keys: Keys, codec: IndexCodec) -> Tensor:
    """Without their scales."""
    form = torch.float32 if codec.form == "f32" else torch.float8_e4m3fn
    return keys.values.view(form).double()


def index_top_k(
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    codec: IndexCodec,
    *,
    k: int,
    out: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """`index_logits`, then `top_k`."""
    logits = index_logits(queries, weights, pages, page_table, lengths, codec)
    return top_k(logits, lengths, k=k, out=out)


def top_k(
    logits: Tensor, lengths: Tensor, *, k: int, out: Tensor | None = None, threads: int = 1
) -> Tensor:
    """The positions [q, k] of the k greatest of the first lengths[q] logits, ascending, then -1.

    Equal logits go to the lowest position first. NaN counts as the greatest, so that it is seen.
    """
    check_top_k(logits, lengths, k)
    count, width = logits.shape
    _require_in_range("lengths", lengths, low=0, limit=width + 1)
    beyond = torch.arange(width, device=logits.device) >= lengths[:, None]
    ranked = logits.masked_fill(beyond, -math.inf).sort(dim=-1, descending=True, stable=True)
    chosen = ranked.indices[:, :k].masked_fill(
        torch.arange(min(k, width), device=logits.device) >= lengths[:, None], width
    )
    ascending = chosen.sort(dim=-1).values.to(torch.int32)
    selection = ascending.new_empty((count, k)) if out is None else out
    require("out", selection, (count, k), ("torch.int32",))
    selection.fill_(-1)
    selection[:, : min(k, width)] = ascending.masked_fill(ascending == width, -1)
    return selection


def expert_products(
    tokens: Tensor,
    ends: Tensor,
    weights: Tensor,
    *,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Tokens [n, depth] times the weights [experts, width, depth] of their experts: [n, width].

    Tokens are sorted by expert; those of expert e lie from ends[e - 1] up to ends[e], int32. What
    lies behind the last end is not read, and `out` is left as it is there; without one it is made,
    zeros there, in the type of the tokens. Weights in e4m3 have a float32 scale for each 128 x 128.
    """
    check_products(tokens, ends, weights, scales, out)
    places = ends.tolist()
    require_ends(places, count=len(tokens))
    made = tokens.new_zeros(len(tokens), weights.shape[1]) if out is None else out
    for expert, (start, end) in enumerate(pairwise((0, *places))):
        plain = weights[expert].double()
        if scales is not None:
            plain = plain * _spread_scales(scales[expert], plain)
        made[start:end] = tokens[start:end].double() @ plain.T
    return made


def _spread_scales(scales: Tensor, plain: Tensor) -> Tensor:
    """One for each weight, where the last blocks may be cut short."""
    whole = scales.double().repeat_interleave(SCALE_GROUP, 0).repeat_interleave(SCALE_GROUP, 1)
    return whole[: plain.shape[0], : plain.shape[1]]
