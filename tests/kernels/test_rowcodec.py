"""Rows against the definitions of their floats, against torch's casts, and between backends."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels import backend
from ess.kernels.checks import require_readable
from ess.kernels.cpu import codec as native_codec
from ess.kernels.cpu import native
from ess.kernels.ops import Ops
from ess.kernels.reference import formats
from ess.layout import RowCodec
from tests.kernels.bits import all_bf16, array, random_bits, same_values, torch_code
from tests.kernels.sets import SETS, is_refused, op_set
from tests.support.built import needs_native
from tests.support.few import few

CAST_ROWS = 32_768
FP8 = RowCodec()
CODECS = {
    "656": FP8,
    "264": RowCodec(latent_dim=256, rope_dim=0),
    "528": RowCodec(rope_dim=0),
    "584": RowCodec(rope_dim=28),
    "136": RowCodec(latent_dim=128, rope_dim=2),
    "published V4": RowCodec(form="fp8_64", rope_dim=0, plain_dim=64),
    "byte-168": RowCodec(form="fp8_64", latent_dim=146, rope_dim=0, plain_dim=18),
    "1152": RowCodec(form="bf16"),
    "bf16-24": RowCodec(form="bf16", latent_dim=9, rope_dim=3),
    "2304": RowCodec(form="f32"),
    "f32-12": RowCodec(form="f32", latent_dim=3, rope_dim=0),
}


class Numpy:
    """The specification and the compiled codec behind the calls of a backend."""

    def __init__(self, module: object) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        def call(source: torch.Tensor, codec: RowCodec, out: torch.Tensor) -> torch.Tensor:
            getattr(self.module, name)(array(source), codec, array(out))
            return out

        return call


@pytest.fixture(params=["spec", "rowcodec", *SETS])
def ops(request: pytest.FixtureRequest) -> object:
    if request.param == "spec":
        return Numpy(formats)
    if request.param == "rowcodec":
        return Numpy(native_codec)
    return op_set(request.param)


def encode(ops: object, values: torch.Tensor, codec: RowCodec) -> np.ndarray:
    return ops.encode_rows(values, codec, empty_rows(len(values), codec)).numpy()


def decode(
    ops: object, rows: np.ndarray, codec: RowCodec, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.zeros(len(rows), codec.latent_dim + codec.rope_dim, dtype=dtype)
    return ops.decode_rows(torch.from_numpy(rows), codec, out)


def empty_rows(count: int, codec: RowCodec) -> torch.Tensor:
    return torch.full((count, codec.row_bytes), 0xA5, dtype=torch.uint8)


# Four groups and a rope part, every byte by hand (little-endian):
# 0  amax 448, scale 1 = 0x3F800000. 448 is the last code 0x7E; 1 has exponent 7 = 0x38; 2^-9 is the
#    first subnormal; 2^-10 ties between 0 and it, to 0; 3 * 2^-10 ties between 1 and 2, to 2;
#    1.0625 ties between 0x38 and 0x39, to 0x38; 1.1875 between 0x39 and 0x3A, to 0x3A
# 1  nothing but zeros: amax counts as 1e-4, 1e-4 / 448 rounds up to 2^-22 = 0x34800000
# 2  amax 1: 1 / 448 rounds up to 2^-8 = 0x3B800000, so 1 is coded as 256 = 2^8 -> 0x78
# 3  one NaN: NaN scale 0x7FC00000, NaN codes
# rope  1; 1 + 2^-8, a tie, to 0x3F80; 1 + 3 * 2^-8, a tie, to 0x3F82; NaN; inf; -0; 3.4e38 -> inf
GOLDEN_VALUES = np.zeros(576, np.float32)
GOLDEN_VALUES[:10] = [448, -448, 1, 0.5, 2**-9, 2**-10, 3 * 2**-10, -0.0, 1.0625, 1.1875]
GOLDEN_VALUES[256] = 1
GOLDEN_VALUES[400] = np.nan
GOLDEN_VALUES[512:519] = [1, 1 + 2**-8, 1 + 3 * 2**-8, np.nan, np.inf, -0.0, 3.4e38]
GOLDEN_ROW = bytes.fromhex(
    "7efe3830010002 80383a" + "00" * 118
    + "00" * 128
    + "78" + "00" * 127
    + "7f" * 128
    + "0000803f" "00008034" "0000803b" "0000c07f"
    + "803f 803f 823f c07f 807f 0080 807f" + "0000" * 57
)  # fmt: skip


def test_a_row_has_the_golden_bytes(ops: object) -> None:
    rows = encode(ops, torch.from_numpy(GOLDEN_VALUES[None]), FP8)
    assert len(GOLDEN_ROW) == FP8.row_bytes == 656
    assert rows[0].tobytes().hex() == GOLDEN_ROW.hex()


def hard_values(codec: RowCodec, dtype: torch.dtype) -> torch.Tensor:
    """Ordinary rows, rows of wild bits, and rows at the edges of scales."""
    width = codec.latent_dim + codec.rope_dim
    rng = np.random.default_rng(width)
    spread = np.exp2(rng.uniform(-30, 30, (16, 1))).astype(np.float32)
    ordinary = rng.standard_normal((16, width), dtype=np.float32) * spread
    wild = random_bits(width, 16 * width).reshape(16, width)
    edges = np.ldexp(np.float32(448), rng.integers(-30, 30, (16, width))).astype(np.float32)
    edges = (edges.view(np.int32) + rng.integers(-1, 2, edges.shape, np.int32)).view(np.float32)
    zeros = np.copysign(np.zeros((2, width), np.float32), np.array([[1], [-1]], np.float32))
    return torch.from_numpy(np.concatenate([ordinary, wild, edges, zeros])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_bytes_are_those_of_the_specification(
    ops: object, codec: RowCodec, dtype: torch.dtype
) -> None:
    if is_refused(ops, codec):
        return
    values = hard_values(codec, dtype)
    want = encode(Numpy(formats), values, codec)
    assert np.array_equal(encode(ops, values, codec), want)
    for out_type in (torch.float32, torch.bfloat16):
        want_values = decode(Numpy(formats), want, codec, out_type)
        same_values(decode(ops, want, codec, out_type), want_values)


def test_any_float_in_range_is_cast_as_torch_casts_it(ops: object) -> None:
    """A group that holds 448 has scale 1: its codes are plain casts."""
    count = 8_192 if ops.__class__ is Numpy and ops.module is formats else CAST_ROWS
    bits = random_bits(3, count * 127)
    small = np.where(np.abs(bits) <= 448, bits, np.float32(0.3))
    values = torch.full((count, 128), 448.0)
    values[:, 1:] = torch.from_numpy(small.reshape(count, 127))
    codec = RowCodec(latent_dim=128, rope_dim=0)
    rows = encode(ops, values, codec)
    assert np.array_equal(rows[:, :128], torch_code(values))
    same_values(decode(ops, rows, codec), values.to(torch.float8_e4m3fn).float())


def test_every_bf16_in_range_is_cast_as_torch_casts_it(ops: object) -> None:
    finite = all_bf16()
    finite = finite[finite.abs() <= 448]
    values = torch.full((-(-len(finite) // 127), 128), 448.0, dtype=torch.bfloat16)
    for start in range(0, len(finite), 127):
        part = finite[start : start + 127]
        values[start // 127, 1 : 1 + len(part)] = part
    rows = encode(ops, values, RowCodec(latent_dim=128, rope_dim=0))
    assert np.array_equal(rows[:, :128], torch_code(values.float()))


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("every", few([61], all_of=[61, 1]))
def test_every_float_in_range_is_cast_as_torch_casts_it(every: int) -> None:
    """Of all 2,277,507,074, both signs, each `every`-th, 127 to a group that holds 448. Codes
    change beside floats that bfloat16 has too: of their neighbours none is left out."""
    codec = RowCodec(latent_dim=128, rope_dim=0)
    chunk, end = 127 * 65_536, int(np.float32(448).view(np.uint32)) + 1
    values = np.full((65_536, 128), 448, np.float32)
    rows = np.zeros((65_536, codec.row_bytes), np.uint8)
    ties = np.arange(0, end, 1 << 16, dtype=np.int64)[:, None] + np.arange(-2, 3)
    near = np.clip(ties.reshape(-1), 0, end - 1).astype(np.uint32)
    starts = range(0, end, chunk * every)
    spread = (np.arange(at, min(at + chunk * every, end), every, np.uint32) for at in starts)
    for part in itertools.chain([near], spread):
        bits = np.resize(part, chunk)
        values[:, 1:] = bits.view(np.float32).reshape(-1, 127)
        for _ in range(2):
            native_codec.encode_rows(values, codec, rows)
            assert np.array_equal(rows[:, :128], torch_code(torch.from_numpy(values)))
            np.negative(values, out=values)


SCALES = [
    *(
        2.0**e
        for e in (-149, -140, -127, -126, -118, -117, -116, -22, -1, 0, 1, 100, 118, 119, 120)
    ),
    *(0.0, -0.0, -1.0, 1.1, 0.7e-38, 3e38, np.inf, -np.inf, np.nan),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_under_any_scale(ops: object, dtype: torch.dtype) -> None:
    """Rows that ESS did not write: any bytes decode as torch's cast times the scale."""
    scales = np.array(SCALES, np.float32)
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(scales), 1))
    rows = np.concatenate([codes, np.repeat(scales, 2).view(np.uint8).reshape(-1, 8)], axis=1)
    floats = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    want = floats * torch.from_numpy(scales)[:, None]
    same_values(decode(ops, rows, CODECS["264"], dtype), want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_under_every_byte_of_a_scale(ops: object, dtype: torch.dtype) -> None:
    """All 256 of them: powers of two from 2^-127 on, the last one is no number."""
    exponents = np.arange(256, dtype=np.uint8)
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    rows = np.concatenate([codes, np.repeat(exponents[:, None], 8, axis=1)], axis=1)
    rows[:, 260:] = 0xA5
    codec = RowCodec(form="fp8_64", latent_dim=256, rope_dim=0)
    if is_refused(ops, codec):
        return
    assert codec.row_bytes == rows.shape[1] == 264
    floats = torch.from_numpy(codes).view(torch.float8_e4m3fn).double()
    powers = 2.0 ** (torch.from_numpy(exponents).double() - 127)
    powers[255] = torch.nan
    want = (floats * powers[:, None]).float()
    same_values(decode(ops, rows, codec, dtype), want.to(dtype))


def test_the_published_row_by_hand(ops: object) -> None:
    """Seven groups of 64 codes, 64 plain values, seven exponents, a zero: amax 448 is scale 1, its
    exponent 127; zeros count as 1e-4, which is 2^-22; a broken group has no number at all."""
    if is_refused(ops, CODECS["published V4"]):
        return
    values = np.zeros((1, 512), np.float32)
    values[0, :2], values[0, 64], values[0, 128] = [448, -1], 1, np.nan
    values[0, 448:450] = [1 + 3 * 2**-8, -2]
    wanted = bytes.fromhex("7eb8" + "00" * 62 + "78" + "00" * 63 + "7f" * 64 + "00" * 256)
    wanted += bytes.fromhex("823f 00c0" + "0000" * 62 + "7f77ff69696969" + "00")
    rows = encode(ops, torch.from_numpy(values), CODECS["published V4"])
    assert rows[0].tobytes().hex() == wanted.hex()


@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_value_poisons_its_group_and_no_other(ops: object, broken: float) -> None:
    values = torch.ones(3, 576)
    values[1, 300] = broken
    rows = encode(ops, values, FP8)
    for dtype in (torch.float32, torch.bfloat16):
        seen = decode(ops, rows, FP8, dtype)
        assert seen[1, 256:384].isnan().all()
        seen[1, 256:384] = 1
        assert torch.equal(seen, torch.ones(3, 576, dtype=dtype))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_rope_value_stays_what_it_is(ops: object, broken: float) -> None:
    values = torch.ones(1, 576)
    values[0, 530] = broken
    same_values(decode(ops, encode(ops, values, FP8), FP8), values)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_freed_rows_decode_to_nan(ops: object, codec: RowCodec) -> None:
    if is_refused(ops, codec):
        return
    assert decode(ops, np.full((2, codec.row_bytes), 0xFF, np.uint8), codec).isnan().all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_second_round_trip_changes_nothing(ops: object, codec: RowCodec) -> None:
    if is_refused(ops, codec):
        return
    once = decode(ops, encode(ops, hard_values(codec, torch.float32)[:16], codec), codec)
    same_values(decode(ops, encode(ops, once, codec), codec), once)


def test_error_is_at_most_half_a_step(ops: object) -> None:
    values = hard_values(FP8, torch.float32)[:16]
    rows = encode(ops, values, FP8)
    scales = torch.from_numpy(rows[:, 512:528].copy().view(np.float32)).repeat_interleave(128, 1)
    latent = values[:, :512]
    error = (decode(ops, rows, FP8)[:, :512] - latent).abs()
    assert torch.all(error <= torch.maximum(latent.abs() * 2**-4, scales * 2**-10))


def test_plain_forms_keep_every_bit(ops: object) -> None:
    wild = torch.from_numpy(random_bits(5, 40 * 576).reshape(40, 576))
    assert encode(ops, wild, CODECS["2304"]).tobytes() == wild.numpy().tobytes()
    halves = all_bf16()[: 100 * 576].reshape(100, 576)
    assert encode(ops, halves, CODECS["1152"]).tobytes() == array(halves).tobytes()
    rope = encode(ops, halves, FP8)[:, 528:]
    assert rope.tobytes() == array(halves)[:, 512:].tobytes()


def test_zero_rows_are_encoded_and_decoded(ops: object) -> None:
    assert encode(ops, torch.zeros(0, 576), FP8).shape == (0, 656)
    assert decode(ops, np.zeros((0, 656), np.uint8), FP8).shape == (0, 576)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_rows_may_lie_apart(ops: object, codec: RowCodec) -> None:
    if is_refused(ops, codec):
        return
    values = hard_values(codec, torch.float32)
    want = encode(ops, values, codec)
    arena = torch.full((2 * len(values), codec.row_bytes + 4), 0xA5, dtype=torch.uint8)
    ops.encode_rows(values, codec, arena[::2, 4:])
    assert np.array_equal(arena[::2, 4:].numpy(), want)
    assert (arena[1::2] == 0xA5).all()
    assert (arena[:, :4] == 0xA5).all()
    wide = torch.full((3 * len(values), values.shape[1] + 1), 7.0)
    ops.decode_rows(arena[::2, 4:], codec, wide[::3, 1:])
    same_values(wide[::3, 1:].contiguous(), decode(ops, want, codec))
    assert (wide[1::3] == 7).all()
    assert (wide[:, 0] == 7).all()


# ---- bad input: a sentence with the name and the numbers, and nothing written ----


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("values", "rows", "codec", "says"),
    [
        (torch.zeros(2, 575), empty_rows(2, FP8), FP8, r"values has shape \(2, 575\).*\(2, 576\)"),
        (torch.zeros(3, 576), empty_rows(2, FP8), FP8, r"values has shape \(3, 576\).*\(2, 576\)"),
        (torch.zeros(576), empty_rows(1, FP8), FP8, "values has shape"),
        (torch.zeros(2, 576), empty_rows(2, CODECS["584"]), FP8, r"rows has shape \(2, 584\)"),
        (torch.zeros(2, 576).half(), empty_rows(2, FP8), FP8, "float16"),
        (torch.zeros(2, 576), empty_rows(2, FP8).view(torch.int8), FP8, "int8"),
        (torch.zeros(2, 576), empty_rows(2, FP8), RowCodec(form="opaque", opaque_bytes=656), "own"),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(
    name: str, values: torch.Tensor, rows: torch.Tensor, codec: RowCodec, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        backend.ops(name).encode_rows(values, codec, rows)
    with pytest.raises(BadInput, match=says):
        backend.ops(name).decode_rows(rows, codec, values)
    assert (rows.view(torch.uint8) == 0xA5).all()


def test_no_device_reads_rows_with_a_byte_of_scale() -> None:
    """Its kernels know 128 values to a scale in float32, and would read something else."""
    require_readable(CODECS["published V4"], "cpu")
    with pytest.raises(
        BadInput, match="no kernel of a device reads or writes rows of the form fp8"
    ):
        require_readable(CODECS["published V4"], "cuda")


@pytest.fixture(params=SETS)
def set_ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


def test_memory_that_kernels_could_not_address(set_ops: Ops) -> None:
    values, rows = torch.zeros(2, 576), empty_rows(2, FP8)
    apart = torch.zeros(2, 1312, dtype=torch.uint8)[:, ::2]
    for bad_values, bad_rows, says in (
        (values, apart, "rows steps 2 elements within a row"),
        (values, torch.zeros(2, 658, dtype=torch.uint8)[:, :656], "rows has rows 658 bytes apart"),
    ):
        with pytest.raises(BadInput, match=says):
            set_ops.encode_rows(bad_values, FP8, bad_rows)
        with pytest.raises(BadInput, match=says):
            set_ops.decode_rows(bad_rows, FP8, bad_values)
    with pytest.raises(BadInput, match="values steps 2 elements within a row"):
        set_ops.decode_rows(rows, FP8, torch.zeros(2, 1152)[:, ::2])


@pytest.mark.parametrize("start", [0, 2300, 2304])
def test_values_and_rows_that_share_memory(set_ops: Ops, start: int) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    values = memory[:2304].view(torch.float32)[None]
    rows = memory[start : start + 656].view(1, 656)
    if start == 2304:
        set_ops.encode_rows(values, FP8, rows)
        return
    with pytest.raises(BadInput, match="values and rows overlap in memory"):
        set_ops.encode_rows(values, FP8, rows)
    with pytest.raises(BadInput, match="values and rows overlap in memory"):
        set_ops.decode_rows(rows, FP8, values)


def test_values_whose_elements_lie_apart_are_copied(set_ops: Ops) -> None:
    values = hard_values(FP8, torch.float32)
    apart = torch.zeros(len(values), 1152)[:, ::2].copy_(values)
    assert np.array_equal(encode(set_ops, apart, FP8), encode(set_ops, values, FP8))


# ---- the compiled library ----


@pytest.mark.parametrize(
    ("plain_dim", "rope_dim", "says"),
    [
        (62, 0, "without plain_dim 62 is not a positive multiple of 64"),
        (512, 0, "without plain_dim 512 is not a positive"),
        (63, 0, "an even plain_dim, not 63"),
        (-64, 0, "an even plain_dim, not -64"),
        (64, 2, "no rope_dim, not 2"),
    ],
)
def test_a_row_of_groups_of_64_has_their_size_or_is_refused(
    plain_dim: int, rope_dim: int, says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        RowCodec(form="fp8_64", rope_dim=rope_dim, plain_dim=plain_dim)


DIGEST = """
import hashlib, numpy as np
from ess.kernels.cpu import codec as native_codec, native
from ess.layout import RowCodec
digest = hashlib.sha256()
for codec in (
    RowCodec(), RowCodec(latent_dim=128, rope_dim=2), RowCodec(form="bf16"),
    RowCodec(form="fp8_64", rope_dim=0, plain_dim=64),
):
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 256, (600, codec.row_bytes), dtype=np.uint8)
    width = codec.latent_dim + codec.rope_dim
    floats = rng.integers(0, 1 << 32, (600, width), dtype=np.uint32).view(np.float32)
    halves = rng.integers(0, 1 << 16, (600, width), dtype=np.uint16)
    for values in (floats, halves):
        digest.update(native_codec.encode_rows(values, codec, rows.copy()))
        decoded = native_codec.decode_rows(rows, codec, values.copy())
        nan = np.isnan(decoded) if decoded.dtype == np.float32 else (decoded & 0x7FFF) > 0x7F80
        decoded[nan] = 0
        digest.update(decoded)
print(native.isa() if native.available() else "none", digest.hexdigest())
"""


@needs_native
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_writes_the_same_bytes(isa: str) -> None:
    environment = {**os.environ, "ESS_ISA": isa}
    run = [sys.executable, "-c", DIGEST]
    used, digest = subprocess.check_output(run, env=environment, text=True).split()
    if used != isa:
        pytest.skip(f"this machine has no {isa}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        assert digest == specification_digest()


def specification_digest() -> str:
    printed: list[str] = []
    exec(DIGEST, {"print": lambda *words: printed.extend(words)})
    return printed[1]


@needs_native
def test_flushing_subnormals_changes_nothing() -> None:
    values = hard_values(FP8, torch.float32)
    values[:, :512:3] *= 2**-14
    rows = encode(Numpy(formats), values, FP8)
    want = decode(Numpy(formats), rows, FP8)
    assert torch.set_flush_denormal(True)
    try:
        ours = native_codec.encode_rows(values.numpy(), FP8, np.zeros_like(rows))
        back = native_codec.decode_rows(rows, FP8, np.zeros((len(rows), 576), np.float32))
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(ours, rows)
    same_values(torch.from_numpy(back), want)


@needs_native
def test_repeats_are_equal() -> None:
    values = hard_values(FP8, torch.float32).numpy()
    rows = np.zeros((len(values), 656), np.uint8)
    digests = {
        hashlib.sha256(native_codec.encode_rows(values, FP8, rows)).hexdigest() for _ in range(20)
    }
    assert len(digests) == 1


def test_without_the_library_the_cpu_ops_are_the_specification() -> None:
    values = hard_values(FP8, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        assert "numpy" in backend.chosen("cpu")
        without = encode(backend.ops("cpu"), values, FP8)
    assert np.array_equal(without, encode(backend.ops("cpu"), values, FP8))
