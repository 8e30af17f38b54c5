"""Every op in plain torch: slow, obvious, the truth that other backends are held to.

Attention and index logits are computed in float64 and rounded to float32 at the end, so that the
order of a sum is no part of the answer.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.kernels.calls import Attend, Cuts, Draws, IndexQueries, Keys, Linear, Products, RowFinish
from ess.kernels.merge import combine as merge
from ess.kernels.reference import cut as cutting
from ess.kernels.reference import finish as finishing
from ess.kernels.reference import noise
from ess.kernels.reference.finish import finish_keys, turn_queries
from ess.kernels.reference.keys import encode_groups, encode_keys, hadamard, read_keys
from ess.kernels.reference.received import add_received, gate_received, take_received
from ess.layout import BYTE_SCALED, SCALE_GROUP, IndexCodec, RowCodec
from ess.units import PAGE_ROWS


def implementation() -> str:
    return "torch"


def has_stages() -> bool:
    return False


def reaches(tensor: Tensor, *, in_place: bool) -> bool:
    return True


def checked_before(name: str, ids: Tensor) -> bool:
    return True


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> None:
    if codec.form == "fp8_64":
        return _encode_by_bytes(values, codec, out)
    if codec.form != "fp8":
        plain = values.float() if codec.form == "f32" else _narrow(values)
        out.copy_(plain.contiguous().view(torch.uint8))
        return
    latent, rope = values.tensor_split([codec.latent_dim], dim=1)
    groups = latent.float().reshape(_groups_shape(latent, codec))
    codes, scales = encode_groups(groups, power_of_two=True)
    parts = codes.flatten(1), scales, _narrow(rope).contiguous()
    out.copy_(torch.cat([part.view(torch.uint8) for part in parts], dim=1))


def decode_rows(rows: Tensor, codec: RowCodec, out: Tensor) -> None:
    if not len(rows):
        return
    if codec.form == "fp8_64":
        return _decode_by_bytes(rows, codec, out)
    if codec.form != "fp8":
        plain = rows.contiguous().view(torch.float32 if codec.form == "f32" else torch.bfloat16)
        out.copy_(_narrow(plain) if out.dtype == torch.bfloat16 else plain)
        return
    ends = [codec.latent_dim, codec.latent_dim + 4 * codec.scale_count]
    codes, scales, rope = (part.contiguous() for part in rows.tensor_split(ends, dim=1))
    groups = codes.view(torch.float8_e4m3fn).float().view(_groups_shape(rows, codec))
    latent = (groups * scales.view(torch.float32)[..., None]).flatten(1)
    out[:, : codec.latent_dim] = _narrow(latent) if out.dtype == torch.bfloat16 else latent
    out[:, codec.latent_dim :] = rope.view(torch.bfloat16)


def _encode_by_bytes(values: Tensor, codec: RowCodec, out: Tensor) -> None:
    coded, tail = values.tensor_split([codec.latent_dim - codec.plain_dim], dim=1)
    groups = coded.float().reshape(len(values), codec.scale_count, BYTE_SCALED)
    codes, scales = encode_groups(groups, power_of_two=True)
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    parts = codes.flatten(1).view(torch.uint8), _narrow(tail).contiguous().view(torch.uint8)
    whole = torch.cat([*parts, exponents], dim=1)
    out[:, : whole.shape[1]], out[:, whole.shape[1] :] = whole, 0


def _decode_by_bytes(rows: Tensor, codec: RowCodec, out: Tensor) -> None:
    coded, count = codec.latent_dim - codec.plain_dim, codec.scale_count
    ends = [coded, coded + 2 * codec.plain_dim, coded + 2 * codec.plain_dim + count]
    codes, tail, exponents, _ = (part.contiguous() for part in rows.tensor_split(ends, dim=1))
    bits = (exponents.int() << 23).masked_fill(exponents == 0, 1 << 22)
    scales = bits.view(torch.float32).masked_fill(exponents == 255, torch.nan)
    groups = codes.view(torch.float8_e4m3fn).float().view(len(rows), count, BYTE_SCALED)
    latent = (groups * scales[..., None]).flatten(1)
    out[:, :coded] = _narrow(latent) if out.dtype == torch.bfloat16 else latent
    out[:, coded:] = tail.view(torch.bfloat16)


def _groups_shape(rows: Tensor, codec: RowCodec) -> tuple[int, int, int]:
    return len(rows), codec.scale_count, SCALE_GROUP


def _narrow(values: Tensor) -> Tensor:
    """To bfloat16. Torch writes a NaN in several ways; here it is always 0x7FC0."""
    if values.dtype == torch.bfloat16:
        return values
    bits = values.to(torch.bfloat16).view(torch.int16)
    return bits.masked_fill(values.isnan(), 0x7FC0).view(torch.bfloat16)


def store_rows(values: Tensor, codec: RowCodec, out: Tensor, places: Tensor) -> None:
    finishing.store_rows(values, codec, out, places, encode_rows)


def finish_rows(
    values: Tensor, finish: RowFinish, codec: RowCodec, out: Tensor, places: Tensor | None
) -> None:
    finishing.finish_rows(values, finish, codec, out, places, encode_rows)


def attend(call: Attend) -> None:
    if call.adds:
        return call.in_two(attend, merge)
    codec, rows = call.codec, call.rows
    elsewhere = rows if call.placed is None else call.placed
    for q, query in enumerate(call.queries):
        slot = call.slots[q, call.slots[q] != -1].long()
        chosen = rows.new_empty(len(slot), codec.row_bytes)
        chosen[slot >= 0], chosen[slot < 0] = rows[slot[slot >= 0]], elsewhere[-2 - slot[slot < 0]]
        keys = torch.empty(len(slot), codec.latent_dim + codec.rope_dim, device=rows.device)
        decode_rows(chosen, codec, keys)
        logits = query.double() @ keys.double().T * call.scale
        call.into.out[q] = logits.softmax(dim=-1) @ keys[:, : codec.latent_dim].double()
        call.into.lse[q] = logits.logsumexp(dim=-1)


def index_logits(call: IndexQueries, out: Tensor) -> None:
    out.fill_(-math.inf)
    for q, length in enumerate(call.lengths.tolist()):
        position = torch.arange(length, device=out.device)
        page = call.page_table[q, position // PAGE_ROWS].long()
        row_ids = page * PAGE_ROWS + position % PAGE_ROWS
        keys = read_keys(call.pages, row_ids, call.codec)
        dots = call.queries[q].double() @ _key_values(keys, call.codec).T
        total = (call.weights[q].double()[:, None] * dots.relu()).sum(dim=0)
        out[q, :length] = total * keys.scales.double()


def _key_values(keys: Keys, codec: IndexCodec) -> Tensor:
    """Without their scales."""
    form = torch.float32 if codec.form == "f32" else torch.float8_e4m3fn
    return keys.values.view(form).double()


def index_top_k(call: IndexQueries, out: Tensor) -> None:
    index_scored(call, out)


def index_scored(call: IndexQueries, out: Tensor) -> Tensor:
    logits = call.weights.new_empty(len(call.queries), call.width)
    index_logits(call, logits)
    top_k(logits, call.lengths, out, call.threads)
    return logits


def top_k(logits: Tensor, lengths: Tensor, out: Tensor, threads: int) -> None:
    width = logits.shape[1]
    kept = min(out.shape[1], width)
    beyond = torch.arange(width, device=logits.device) >= lengths[:, None]
    ranked = logits.masked_fill(beyond, -math.inf).sort(dim=-1, descending=True, stable=True)
    chosen = ranked.indices[:, :kept].masked_fill(
        torch.arange(kept, device=logits.device) >= lengths[:, None], width
    )
    ascending = chosen.sort(dim=-1).values.to(torch.int32)
    out.fill_(-1)
    out[:, :kept] = ascending.masked_fill(ascending == width, -1)


def cut(scores: Tensor, cuts: Cuts, out: Tensor) -> None:
    cutting.cut_sorted(scores, cuts, out)


def draw(scores: Tensor, draws: Draws, tokens: Tensor) -> None:
    noise.draw(scores, draws, tokens)


def expert_products(call: Products) -> None:
    begin = 0 if call.begin is None else int(call.begin)
    for expert, (start, end) in enumerate(pairwise((begin, *call.ends.tolist()))):
        plain = call.weights[expert].double()
        if call.scales is not None:
            plain = plain * _spread_scales(call.scales[expert], plain)
        call.out[start:end] = call.tokens[start:end].double() @ plain.T


def counts_to_build(weights: Tensor, count_max: int) -> list[int]:
    return []


def linear_fp8(call: Linear) -> None:
    """Values are rounded to e4m3 first, 128 of a line under one scale: amax / 448."""
    values, weights, scales, out = call
    depth = values.shape[1]
    padded = F.pad(values.float(), (0, -depth % SCALE_GROUP))
    groups = padded.view(len(values), padded.shape[1] // SCALE_GROUP, SCALE_GROUP)
    codes, sizes = encode_groups(groups, power_of_two=False)
    rounded = codes.view(torch.float8_e4m3fn).double() * sizes.double()[..., None]
    plain = weights.double() * _spread_scales(scales, weights)
    out.copy_(rounded.flatten(1)[:, :depth] @ plain.T)


def _spread_scales(scales: Tensor, plain: Tensor) -> Tensor:
    """A scale for each weight, where the last blocks may be cut short."""
    whole = scales.double().repeat_interleave(SCALE_GROUP, 0).repeat_interleave(SCALE_GROUP, 1)
    return whole[: plain.shape[0], : plain.shape[1]]
