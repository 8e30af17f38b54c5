"""Index keys: their bytes, their places in a page, the Hadamard transform."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels.calls import Keys
from ess.kernels.cpu import native
from ess.kernels.ops import Ops
from ess.kernels.reference import formats
from ess.layout import IndexCodec
from tests.kernels.bits import array
from tests.kernels.sets import SETS, op_set, says_so

CODECS = {
    "ue8m0": IndexCodec(),
    "f32-scale": IndexCodec(scale_format="f32"),
    "ue8m0-32": IndexCodec(key_dim=32),
    "f32-scale-20": IndexCodec(key_dim=20, scale_format="f32"),
    "f32": IndexCodec(form="f32"),
    "f32-4": IndexCodec(form="f32", key_dim=4),
}


@pytest.fixture(params=[*SETS, "cpu without library"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    name, *without = request.param.split(" ", 1)
    with pytest.MonkeyPatch.context() as patch:
        if without:
            patch.setattr(native, "available", lambda: False)
        yield op_set(name)


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def codec(request: pytest.FixtureRequest) -> IndexCodec:
    return request.param


def hard_keys(codec: IndexCodec, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = np.random.default_rng(codec.key_dim)
    shape = 60, codec.key_dim
    spread = np.exp2(rng.uniform(-30, 30, (60, 1))).astype(np.float32)
    ordinary = rng.standard_normal(shape, dtype=np.float32) * spread
    wild = rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    keys = np.concatenate([ordinary, wild, np.zeros((1, codec.key_dim), np.float32)])
    return torch.from_numpy(keys).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_those_of_the_specification(
    ops: Ops, codec: IndexCodec, dtype: torch.dtype
) -> None:
    values = hard_keys(codec, dtype)
    ours, want = ops.encode_keys(values, codec), formats.encode_keys(array(values), codec)
    assert ours.values.numpy().tobytes() == want.values.tobytes()
    assert ours.scales.numpy().tobytes() == want.scales.tobytes()


def test_keys_of_strided_input(ops: Ops, codec: IndexCodec) -> None:
    values = hard_keys(codec)
    wide = torch.zeros(2 * len(values), codec.key_dim + 3)
    wide[::2, 3:] = values
    ours, want = ops.encode_keys(wide[::2, 3:], codec), ops.encode_keys(values, codec)
    assert torch.equal(ours.values, want.values)
    assert torch.equal(ours.scales.view(torch.int32), want.scales.view(torch.int32))


def test_scales_by_hand(ops: Ops) -> None:
    values = torch.zeros(4, 128)
    values[0, 0], values[1, 5], values[2, 7] = 448, -1, 7
    rounded = ops.encode_keys(values, CODECS["ue8m0"])
    assert rounded.scales.tolist() == [1, 2**-8, 2**-6, 2**-22]
    assert rounded.values[[0, 1, 2], [0, 5, 7]].tolist() == [0x7E, 0xF8, 0x7E]
    plain = ops.encode_keys(values, CODECS["f32-scale"])
    want = np.array([448, 1, 7, 1e-4], np.float32) / np.float32(448)
    assert plain.scales.tolist() == want.tolist()
    assert plain.values[[0, 1, 2], [0, 5, 7]].tolist() == [0x7E, 0xFE, 0x7E]


def test_a_broken_number_poisons_its_key_and_no_other(ops: Ops) -> None:
    for broken in (np.nan, np.inf, -np.inf):
        values = torch.ones(3, 128)
        values[1, 77] = broken
        keys = ops.encode_keys(values, CODECS["f32-scale"])
        assert keys.scales.isnan().tolist() == [False, True, False]
        assert (keys.values[1] == 0x7F).all()
        assert (keys.values[::2] == 0x7E).all()


def random_keys(codec: IndexCodec, count: int) -> Keys:
    rng = np.random.default_rng(count)
    values = torch.from_numpy(rng.integers(0, 256, (count, codec.value_bytes), dtype=np.uint8))
    scales = torch.from_numpy(rng.standard_normal(count, dtype=np.float32))
    return Keys(values, scales if codec.scale_bytes else torch.ones(count))


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_written_keys_are_read_back_from_where_they_belong(
    ops: Ops, codec: IndexCodec, id_type: torch.dtype
) -> None:
    page_count, count = 7, 150
    pages = torch.full((page_count, codec.page_bytes), 0xFF, dtype=torch.uint8)
    row_ids = torch.randperm(page_count * 64, generator=torch.Generator().manual_seed(1))[:count]
    row_ids = row_ids.to(id_type)
    keys = random_keys(codec, count)
    ops.write_keys(pages, row_ids, keys, codec)

    want = np.full((page_count, codec.page_bytes), 0xFF, np.uint8)
    for i, row_id in enumerate(row_ids.tolist()):
        page, offset = row_id // 64, row_id % 64
        start = offset * codec.value_bytes
        want[page, start : start + codec.value_bytes] = keys.values[i]
        start = 64 * codec.value_bytes + offset * codec.scale_bytes
        scale = keys.scales[i : i + 1].numpy().view(np.uint8)[: codec.scale_bytes]
        want[page, start : start + codec.scale_bytes] = scale
    assert np.array_equal(pages.numpy(), want)

    back = ops.read_keys(pages, row_ids, codec)
    assert torch.equal(back.values, keys.values)
    assert torch.equal(back.scales, keys.scales)


def test_pages_of_a_larger_slab(ops: Ops, codec: IndexCodec) -> None:
    """Pages may lie apart: one layer of a slab of several."""
    slab = torch.full((3, 2, codec.page_bytes), 0xA5, dtype=torch.uint8)
    keys, row_ids = random_keys(codec, 3), torch.tensor([2 * 64 + 63, 0, 64])
    ops.write_keys(slab[:, 1], row_ids, keys, codec)
    back = ops.read_keys(slab[:, 1], row_ids, codec)
    assert torch.equal(back.values, keys.values)
    assert torch.equal(back.scales, keys.scales)
    assert (slab[:, 0] == 0xA5).all()


def test_zero_keys_are_written_and_read(ops: Ops, codec: IndexCodec) -> None:
    pages, no_ids = torch.zeros(1, codec.page_bytes, dtype=torch.uint8), torch.zeros(0).int()
    keys = ops.encode_keys(torch.zeros(0, codec.key_dim), codec)
    ops.write_keys(pages, no_ids, keys, codec)
    assert ops.read_keys(pages, no_ids, codec).values.shape == (0, codec.value_bytes)


@pytest.mark.parametrize(
    ("row_ids", "key_count", "says"),
    [
        (torch.tensor([128]), 1, r"row_ids holds 128..128, outside 0..127"),
        (torch.tensor([-1, 3]), 2, r"row_ids holds -1..3, outside 0..127"),
        (torch.tensor([1, 2]), 3, r"keys.values has shape \(3, 128\), must be \(2, 128\)"),
        (torch.tensor([1.0]), 1, "row_ids has type torch.float32"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(
    ops: Ops, row_ids: torch.Tensor, key_count: int, says: str
) -> None:
    pages = torch.full((2, IndexCodec().page_bytes), 0xA5, dtype=torch.uint8)
    if says_so(ops, says):
        with pytest.raises(BadInput, match=says):
            ops.write_keys(pages, row_ids, random_keys(IndexCodec(), key_count), IndexCodec())
    assert (pages == 0xA5).all()


def test_bad_pages_and_keys(ops: Ops) -> None:
    pages, row_ids = torch.zeros(2, 8447, dtype=torch.uint8), torch.tensor([0])
    with pytest.raises(BadInput, match=r"pages has shape \(2, 8447\), must be \(any, 8448\)"):
        ops.read_keys(pages, row_ids, IndexCodec())
    with pytest.raises(BadInput, match=r"values has shape \(2, 64\), must be \(any, 128\)"):
        ops.encode_keys(torch.zeros(2, 64), IndexCodec())


# ---- Hadamard ----


def sylvester(size: int) -> torch.Tensor:
    """+1 where the number of ones that row and column share is even, -1 where it is odd."""
    signs = [
        [(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)
    ]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128])
def test_hadamard_is_the_matrix(ops: Ops, size: int) -> None:
    values = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(size))
    ours = ops.hadamard(values)
    torch.testing.assert_close(ours.double(), values.double() @ sylvester(size), atol=1e-6, rtol=0)
    torch.testing.assert_close(ops.hadamard(ours), values, atol=1e-6, rtol=0)
    apart = values.transpose(0, 1)
    assert torch.equal(ops.hadamard(apart), ours.transpose(0, 1))


def test_hadamard_keeps_dot_products(ops: Ops) -> None:
    query, key = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(0))
    rotated = (ops.hadamard(query) * ops.hadamard(key)).sum(-1)
    torch.testing.assert_close(rotated, (query * key).sum(-1), atol=1e-4, rtol=0)


def test_hadamard_needs_a_power_of_two(ops: Ops) -> None:
    with pytest.raises(BadInput, match="power of two, got 96"):
        ops.hadamard(torch.zeros(2, 96))
