"""Products by tile registers, which tests/support/emulated_tiles.h plays where there are none.

What test_attend, test_index, test_screen and test_stage ask of every set is asked of the library
that is built with them; tests of this file that name a library run within that, by a process of
their own.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ess.kernels import backend
from ess.kernels.cpu import native
from ess.kernels.cpu.stage import Stage, pack
from ess.layout import RowCodec
from tests.kernels import test_attend
from tests.kernels.sets import reference
from tests.kernels.test_index import FORMS, HEADS, Case, make, same_bits
from tests.support import tiled
from tests.support.built import needs_native

IS_TILED = bool(os.environ.get(tiled.VARIABLE))
ROWS = {name: test_attend.CODECS[name] for name in ("656", "published V4", "1152", "584")}
ROWS["448"] = RowCodec(form="bf16", latent_dim=208, rope_dim=16)  # 3.25 blocks of 64 values
HALF = ("fp8 under fp8", "fp8 under bf16")
FILES = ("tiles", "attend", "codes", "index", "screen", "stage")
OF_BF16 = (
    "test_attend and (cpu or split) or test_stage and not float32"
    " or test_codes and True or (cpu or screen) and fp8 or whole or refused"
)
plays = pytest.mark.skipif(
    not native.available() or native.kernels() != "avx512_bf16" or not shutil.which("g++"),
    reason="tiles are played by a CPU with AVX-512 in bf16, and a compiler",
)
within = pytest.mark.skipif(not IS_TILED, reason="runs in the process that has played tiles")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiled.build(tmp_path_factory.mktemp("tiled"))


def pytest_with(
    library: Path, *arguments: str, files: tuple[str, ...] = FILES, **environment: str
) -> str:
    named = [str(Path(__file__).with_name(f"test_{name}.py")) for name in files]
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.tiled", *named]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", "not slow and not gpu", *arguments],
        cwd=tiled.ROOT,
        env={**os.environ, tiled.VARIABLE: str(library), **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
@plays
@pytest.mark.skipif(IS_TILED, reason="starts the process that has played tiles")
def test_logits_and_shapes_with_tiles(library: Path) -> None:
    """Where there are tiles, the tests of whole numbers have run with those."""
    of_played = "put_back or played_tiles"
    asked = of_played if native.has_tiles() else f"whole_numbers or {of_played}"
    said = pytest_with(library, "-k", asked)
    assert " passed" in said


@pytest.mark.slow
@pytest.mark.long
@plays
@pytest.mark.skipif(IS_TILED, reason="starts the process that has played tiles")
@pytest.mark.parametrize("name", FILES)
def test_what_holds_for_every_set_holds_with_tiles(library: Path, name: str) -> None:
    said = pytest_with(library, files=(name,))
    assert " passed" in said


@pytest.mark.slow
@plays
@pytest.mark.skipif(IS_TILED, reason="starts the process that has played tiles")
def test_where_tiles_are_refused_the_set_without_them_runs(library: Path, tmp_path: Path) -> None:
    """On a machine with tiles nothing else runs that set's products of bf16, nor its screen."""
    kept = tmp_path / "logits.pt"
    pytest_with(library, "-k", OF_BF16, ESS_TILES_REFUSED="1", LOGITS=str(kept))
    cpu = backend.ops("cpu")
    for form, logits in () if native.has_tiles() else torch.load(kept).items():
        same_bits(make(form, heads=11).run(cpu.index_logits), logits)


@within
@pytest.mark.skipif(not os.environ.get("LOGITS"), reason="asked for by name")
def test_refused_logits() -> None:
    assert not native.has_tiles()
    cpu = backend.ops("cpu")
    logits = {form: make(form, heads=11).run(cpu.index_logits) for form in HALF}
    torch.save(logits, os.environ["LOGITS"])


@within
def test_the_library_is_the_one_with_played_tiles() -> None:
    assert native.has_tiles()
    assert native.kernels() == "avx512_bf16"
    assert native.function("played_store_shapes", [ctypes.c_void_p]) is not None


@within
@pytest.mark.parametrize("is_loaded", [False, True])
def test_shapes_of_others_are_put_back(is_loaded: bool) -> None:
    before, after = (ctypes.c_uint8 * 64)(), (ctypes.c_uint8 * 64)(*[9] * 64)
    if is_loaded:
        before[0], before[16], before[48] = 1, 8, 3
    native.function("played_load_shapes", [ctypes.c_void_p])(before)
    case = make("fp8 under bf16", heads=64)
    case.run(backend.ops("cpu").index_logits)
    rows = test_attend.make(ROWS["656"], heads=5, dtype=torch.bfloat16)
    rows.run(backend.ops("cpu"))
    stage = Stage()
    product = stage.linear(stage.take(32), pack(torch.ones(16, 32).bfloat16()))
    stage.give(product, torch.float32)
    stage([torch.ones(3, 32)])
    native.function("played_store_shapes", [ctypes.c_void_p])(after)
    assert bytes(before) == bytes(after)
    native.function("played_load_shapes", [ctypes.c_void_p])((ctypes.c_uint8 * 64)())


def whole_numbers(form: str, heads: int, key_dim: int) -> Case:
    """Every product and sum is a whole number of eighths that float32 holds: no order matters."""
    case = make(form, heads=heads, key_dim=key_dim, seed=heads)
    random = torch.Generator().manual_seed(heads)

    def small(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=random).float()

    case.queries = small(*case.queries.shape).to(case.queries.dtype)
    case.weights = small(*case.weights.shape) / 4
    pages = len(case.pages)
    codes = small(pages, 64 * key_dim).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.full((pages, 64), 0.5).view(torch.uint8)
    case.pages.copy_(torch.cat([codes, scales], dim=1))
    return case


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("fp8")])
def test_whole_numbers_have_the_reference_s_bits(form: str) -> None:
    """In every set, so this is the portable one against the one with tiles, too."""
    ours, reference = backend.ops("cpu"), backend.ops("reference")
    for heads, key_dim in [(heads, 128) for heads in HEADS] + [(5, 64), (7, 36), (20, 32)]:
        case = whole_numbers(form, heads, key_dim)
        same_bits(case.run(ours.index_logits) + 0.0, case.run(reference.index_logits) + 0.0)


@pytest.mark.skipif(not native.available(), reason="ess._native is not built")
@pytest.mark.parametrize("in_dim", [32, 50, 256])
def test_products_of_whole_numbers_are_exact(in_dim: int) -> None:
    """By tiles, whole and in part, and beside them."""
    random = torch.Generator().manual_seed(in_dim)
    for out_dim in (1, 16, 40, 72, 128, 200):
        weight = torch.randint(-8, 9, (out_dim, in_dim), generator=random).bfloat16()
        stage = Stage()
        stage.give(stage.linear(stage.take(in_dim), pack(weight), factor=0.5), torch.float32)
        for count in (1, 15, 16, 17, 32, 33, 64, 65):
            tokens = torch.randint(-8, 9, (count, in_dim), generator=random).bfloat16()
            [made] = stage([tokens])
            same_bits(made + 0.0, tokens.float() @ weight.float().T / 2 + 0.0)


def drawn_rows(case: test_attend.Case, random: torch.Generator) -> None:
    """Rows of small whole numbers, of 0, 1 and 2 where the queries look: logits are whole numbers
    of bits then, weights are powers of two, and every sum is a number that float32 holds."""
    codec, looks = case.codec, [40, 201, -1]
    for rows in (case.rows, case.placed):
        shape = (len(rows), codec.latent_dim + codec.rope_dim)
        values = torch.randint(-8, 9, shape, generator=random).float()
        values[:, looks] = torch.randint(3, (len(rows), 3), generator=random).float()
        made = torch.empty(len(rows), codec.row_bytes, dtype=torch.uint8)
        rows.copy_(reference.encode_rows(values, codec, made))
    signs = torch.randint(-1, 2, (*case.queries.shape[:2], 3), generator=random)
    case.queries.zero_()
    case.queries[:, :, looks] = signs.to(case.queries.dtype)
    case.scale = math.log(2)


@needs_native
@pytest.mark.parametrize("name", ROWS)
def test_attention_to_whole_numbers_is_exact(name: str) -> None:
    for heads, keys in ((1, 1), (4, 31), (16, 64), (17, 65), (33, 130), (64, 70)):
        case = test_attend.make(ROWS[name], heads=heads, keys=keys, dtype=torch.bfloat16)
        drawn_rows(case, torch.Generator().manual_seed(keys))
        ours = case.run(backend.ops("cpu"))
        for query, slots, out in zip(case.queries, case.slots.tolist(), ours.out, strict=True):
            named = [case.rows[s] if s >= 0 else case.placed[-2 - s] for s in slots if s != -1]
            values = torch.empty(len(named), query.shape[1])
            reference.decode_rows(torch.stack(named), case.codec, values)
            weights = torch.exp2(query.double() @ values.double().T)
            sums = weights @ values.double()[:, : case.codec.latent_dim]
            want = (sums / weights.sum(dim=1, keepdim=True)).float()
            assert torch.equal(out + 0.0, want + 0.0)
