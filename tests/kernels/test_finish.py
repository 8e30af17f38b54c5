"""New rows and keys finished and put where they belong, in every set of ops, against their parts.

Places are a permutation and never the identity; some lines of a batch have none.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ess.errors import BadInput
from ess.kernels.calls import Angles, KeyFinish, RowFinish
from ess.kernels.ops import Ops
from ess.layout import IndexCodec, RowCodec
from tests.kernels.sets import SETS, op_set, reference, says_so

ROW_CODECS = {
    "656": RowCodec(),
    "264": RowCodec(latent_dim=128, rope_dim=66),
    "bf16": RowCodec(form="bf16", latent_dim=20, rope_dim=8),
    "f32": RowCodec(form="f32", latent_dim=24, rope_dim=4),
    "no rope": RowCodec(form="bf16", latent_dim=12, rope_dim=0),
}
KEY_CODECS = {
    "ue8m0": IndexCodec(),
    "interleaved": IndexCodec(key_dim=64, rope_style="interleaved", scale_format="f32"),
    "unmixed": IndexCodec(key_dim=36, hadamard=False),
    "f32": IndexCodec(form="f32", key_dim=20),
    "wide": IndexCodec(key_dim=144, hadamard=False),
}
COUNT = 11


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(dim: int) -> Angles:
    turned = drawn(COUNT, dim // 2, seed=5) * 3
    return Angles(turned.cos(), turned.sin())


def places(room: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Unequal ones in no order, of which three lines have none."""
    order = torch.randperm(room, generator=torch.Generator().manual_seed(9))[:COUNT].to(dtype)
    order[torch.tensor([0, 4, COUNT - 1])] = torch.tensor([-1, -2, -1], dtype=dtype)
    return order


def poisoned(*shape: int) -> torch.Tensor:
    """Rows that lie in gaps."""
    return torch.full((*shape[:-1], shape[-1] + 8), 0xA5, dtype=torch.uint8)[..., : shape[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROW_CODECS)
def test_rows_go_to_their_places(ops: Ops, name: str, dtype: torch.dtype) -> None:
    codec = ROW_CODECS[name]
    values = drawn(COUNT, codec.latent_dim + codec.rope_dim, seed=1, dtype=dtype)
    values[3, 2] = math.nan
    rows = torch.empty(COUNT, codec.row_bytes, dtype=torch.uint8)
    reference.encode_rows(values, codec, rows)
    slots = places(40, torch.int64 if name == "656" else torch.int32)
    want, ours = poisoned(40, codec.row_bytes), poisoned(40, codec.row_bytes)
    want[slots[slots >= 0].long()] = rows[slots >= 0]
    ops.store_rows(values, codec, ours, slots)
    assert torch.equal(ours, want)


def rotated(values: torch.Tensor, turned: Angles, style: str) -> torch.Tensor:
    """Pair by pair, in float64."""
    out, dim = values.double().clone(), turned.dim
    for pair in range(dim // 2):
        a, b = (pair, pair + dim // 2) if style == "half" else (2 * pair, 2 * pair + 1)
        cos, sin = turned.cos[:, pair].double(), turned.sin[:, pair].double()
        while cos.dim() < values.dim() - 1:
            cos, sin = cos[:, None], sin[:, None]
        first, second = values[..., a].double(), values[..., b].double()
        out[..., a], out[..., b] = first * cos - second * sin, second * cos + first * sin
    return out


def near(ours: torch.Tensor, want: torch.Tensor, codec: Any) -> None:
    """Within half a step of e4m3 under a scale that may be the next one, or of the plain form."""
    within = {"fp8": 2**-4, "bf16": 2**-8, "f32": 2**-20}[codec.form]
    least = want.abs().amax(dim=-1, keepdim=True) * (2**-8 if codec.form == "fp8" else 2**-20)
    error = (ours.double() - want).abs()
    assert torch.all(error <= within * want.abs() + least), error.max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROW_CODECS)
def test_rows_are_normed_rotated_and_placed(ops: Ops, name: str, dtype: torch.dtype) -> None:
    codec = ROW_CODECS[name]
    values = drawn(COUNT, codec.latent_dim + codec.rope_dim, seed=2, dtype=dtype)
    weight = drawn(codec.latent_dim, seed=3) + 1
    finish = RowFinish(weight, 1e-6, angles(codec.rope_dim))
    latent, rope = values.double().tensor_split([codec.latent_dim], dim=1)
    normed = latent / (latent.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    want = torch.cat((normed, rotated(rope, finish.angles, "interleaved")), dim=1)
    ours = poisoned(COUNT, codec.row_bytes)
    ops.finish_rows(values, finish, codec, ours)
    seen = torch.empty(COUNT, want.shape[1])
    reference.decode_rows(ours.contiguous(), codec, seen)
    near(seen[:, : codec.latent_dim], want[:, : codec.latent_dim], codec)
    if codec.rope_dim:
        plain = codec if codec.form == "f32" else RowCodec(form="bf16", latent_dim=4, rope_dim=0)
        near(seen[:, codec.latent_dim :], want[:, codec.latent_dim :], plain)
    slots, there = places(40), poisoned(40, codec.row_bytes)
    expected = there.clone()
    expected[slots[slots >= 0].long()] = ours[slots >= 0]
    ops.finish_rows(values, finish, codec, there, slots)
    assert torch.equal(there, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KEY_CODECS)
def test_keys_are_normed_rotated_mixed_and_placed(ops: Ops, name: str, dtype: torch.dtype) -> None:
    codec = KEY_CODECS[name]
    values = drawn(COUNT, codec.key_dim, seed=2, dtype=dtype) + 3
    weight, bias = drawn(codec.key_dim, seed=3) + 1, drawn(codec.key_dim, seed=4)
    turned = angles(min(12, codec.key_dim))
    finish = KeyFinish(weight, bias, 1e-6, turned)
    normed = F.layer_norm(values.double(), (codec.key_dim,), weight.double(), bias.double(), 1e-6)
    want = rotated(normed, turned, codec.rope_style)
    if codec.hadamard and codec.form == "fp8":
        want = reference.hadamard(want.float()).double()
    records = poisoned(COUNT, codec.key_bytes)
    ops.finish_keys(values, finish, codec, records)
    parts = records.contiguous().tensor_split([codec.value_bytes], dim=1)
    kind = torch.float32 if codec.form == "f32" else torch.float8_e4m3fn
    seen = parts[0].contiguous().view(kind).double()
    if codec.scale_bytes:
        seen = seen * parts[1].contiguous().view(torch.float32).double()
    near(seen, want, codec)
    row_ids, pages = places(5 * 64), poisoned(5, codec.page_bytes)
    kept = row_ids >= 0
    expected = pages.contiguous()
    scales = parts[1][kept].contiguous().view(torch.float32)[:, 0] if codec.scale_bytes else None
    scales = torch.ones(int(kept.sum())) if scales is None else scales
    keys = type(reference.encode_keys(values, codec))(parts[0][kept], scales)
    reference.write_keys(expected, row_ids[kept], keys, codec)
    ops.finish_keys(values, finish, codec, pages, row_ids)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("name", KEY_CODECS)
def test_queries_turn_as_their_keys_do(ops: Ops, name: str) -> None:
    codec = KEY_CODECS[name]
    queries = drawn(COUNT, 3, codec.key_dim, seed=6)
    turned = angles(min(12, codec.key_dim))
    want = rotated(queries, turned, codec.rope_style)
    if codec.hadamard and codec.form == "fp8":
        want = reference.hadamard(want.float()).double()
    ours = ops.turn_queries(queries, turned, codec)
    assert ours.dtype == (torch.bfloat16 if codec.form == "fp8" else torch.float32)
    bound = 2**-8 if codec.form == "fp8" else 2**-20
    torch.testing.assert_close(ours.double(), want, rtol=bound, atol=2**-18)


def test_nothing_is_finished_where_nothing_is_new(ops: Ops) -> None:
    codec, keys = RowCodec(), IndexCodec()
    no_ids = torch.zeros(0, dtype=torch.int32)
    none = Angles(torch.zeros(0, 32), torch.zeros(0, 32))
    rows, pages = poisoned(3, codec.row_bytes), poisoned(2, keys.page_bytes)
    for part in (rows, pages):
        part.fill_(7)
    ops.store_rows(torch.zeros(0, 576), codec, rows, no_ids)
    ops.finish_rows(
        torch.zeros(0, 576), RowFinish(torch.ones(512), 1e-6, none), codec, rows, no_ids
    )
    finish = KeyFinish(torch.ones(128), torch.zeros(128), 1e-6, none)
    ops.finish_keys(torch.zeros(0, 128), finish, keys, pages, no_ids)
    assert ops.turn_queries(torch.zeros(0, 4, 128), none, keys).shape == (0, 4, 128)
    assert (rows == 7).all()
    assert (pages == 7).all()


def test_bad_input_changes_nothing(ops: Ops) -> None:
    codec, keys = RowCodec(), IndexCodec()
    values, asked = torch.zeros(COUNT, 576), torch.zeros(COUNT, 128)
    rows, pages = poisoned(40, codec.row_bytes), poisoned(5, keys.page_bytes)
    slots, row_ids, turned = places(40), places(5 * 64), angles(64)
    finish = RowFinish(torch.ones(512), 1e-6, turned)
    key = KeyFinish(torch.ones(128), torch.zeros(128), 1e-6, turned)
    wrong = slots.clone()
    wrong[3] = 40
    for op, given, says in (
        (ops.store_rows, (values, codec, rows, wrong), r"places holds -2..40, outside"),
        (ops.store_rows, (values, codec, rows, slots[:3]), r"places has shape \(3,\)"),
        (ops.store_rows, (values[:, :9], codec, rows, slots), "values has shape"),
        (ops.finish_rows, (values, finish, codec, rows), r"out has shape \(40, 656\)"),
        (
            ops.finish_rows,
            (values, finish._replace(angles=angles(32)), codec, rows, slots),
            r"angles turn 32 numbers",
        ),
        (
            ops.finish_keys,
            (asked, key._replace(bias=torch.zeros(9)), keys, pages, row_ids),
            r"finish.bias has shape \(9,\)",
        ),
        (ops.finish_keys, (asked, key, keys, pages), r"out has shape"),
        (ops.finish_keys, (asked, key, keys, pages, row_ids + 320), "row_ids holds 31"),
        (ops.finish_keys, (asked, key, keys, pages[:, :9], row_ids), "pages has shape"),
        (ops.turn_queries, (asked[:, None], angles(66)._replace(sin=turned.cos), keys), "angles"),
    ):
        if says_so(ops, says):
            with pytest.raises(BadInput, match=says):
                op(*given)
    assert (rows == 0xA5).all()
    assert (pages == 0xA5).all()
