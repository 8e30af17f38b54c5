"""The Triton kernels compiled for sm_90 where there is no GPU.

Whether they can be said at all, what they spill, which instructions they become, and whether two of
their programs would fit on one multiprocessor: then a grid would not leave any of them alone.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ess.layout import IndexCodec, RowCodec

pytest.importorskip("triton", reason="triton is not installed")

from tests.support.compiled import (
    ATTEND,
    LOGITS,
    TOP_K,
    Figures,
    attention_of,
    compiled,
    draw_of,
    figures,
    finishes,
    linear_of,
    logits_of,
    place_of,
    products_of,
    report,
    top_k_of,
    types,
    usage,
)
from tests.support.few import few

FORMS, HEADS = ("fp8", "bf16"), (16, 32, 128)
SHARED_MAX = 227 << 10
REGISTERS = 64 << 10
# What is spilled outside the loop: values that are the same for every task, and with `adds` a part
# of the partial that is taken over.
SPILLED_MAX = {False: 24, True: 256}
SPREAD = types("*fp32: logits, *i32: lengths known, i32: k logit_stride")


def fills_a_multiprocessor(code: Figures, *, warps: int) -> bool:
    return 2 * code.shared > SHARED_MAX or 2 * 32 * warps * code.registers > REGISTERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "heads", "adds"),
    few(
        [("fp8", 128, False), ("fp8", 16, False), ("bf16", 32, False), ("fp8", 128, True)],
        all_of=product(FORMS, HEADS, (False, True)),
    ),
)
def test_attention_does_not_spill_in_its_loop(form: Any, heads: int, adds: bool) -> None:
    """Nor does a product wait for each of its instructions, or repeat what another warp does: 36
    instructions are the logits of 64 heads and as many keys as the warps share out, the rest sums.
    """
    from ess.kernels.cuda.triton.shapes import candidates

    used, *others = candidates(form=form, heads=heads, is_half=True, generation=9)
    for shape in [used] if adds else [used, *others]:
        binary = attention_of(shape, form, adds=adds)
        assert re.search(r"arith\.select .*tt\.divisibility", binary.asm["ttir"]), "rows by words"
        code = figures(binary)
        assert code.shared <= SHARED_MAX
        assert code.spilled <= SPILLED_MAX[adds]
        assert code.loop_spills <= (6 if adds else 0)
        assert code.copies > 0
        assert fills_a_multiprocessor(code, warps=shape.warps)
        if shape.heads >= 64:
            assert code.wgmma == 36 + shape.keys // 16
            assert code.waits == 3
        else:
            assert code.mma > 0


def test_each_launch_says_whether_sums_take_products_whole() -> None:
    """What Triton does otherwise is another thing since 3.10."""
    import ess.kernels.cuda.triton as launches

    said = {"FUSED", "UNFUSED", "EIGHT_WARPS"}
    for path in Path(launches.__path__[0]).glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(func=ast.Subscript(value=ast.Attribute()), keywords=given):
                    spread = {ast.unparse(each.value) for each in given if each.arg is None}
                    assert spread & said, f"{path.name}:{call.lineno}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "heads"), few([("fp8", 128), ("bf16", 16)], all_of=product(FORMS, HEADS))
)
def test_attention_does_not_spill_in_its_loop_on_blackwell(form: Any, heads: int) -> None:
    from ess.kernels.cuda.triton.shapes import candidates

    used, *_ = candidates(form=form, heads=heads, is_half=True, generation=10)
    code = figures(attention_of(used, form, capability=100))
    assert code.loop_spills == 0
    assert code.shared <= SHARED_MAX


@pytest.mark.slow
def test_attention_in_float32_compiles_without_spills() -> None:
    from ess.kernels.cuda.triton import attend
    from ess.kernels.cuda.triton.device import attend as device
    from ess.kernels.cuda.triton.shapes import EXACT

    for form in ("fp8", "f32"):
        shape = EXACT
        binary = compiled(
            device.attend,
            ATTEND | {"queries": "*fp32"},
            attend.constants(RowCodec(form=form), query_dtype=torch.float32, interpreted=False)
            | {"HEADS": shape.heads, "KEYS": shape.keys, "ADDS": False, "ALIGNED": 16},
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        assert binary.metadata.shared <= 227 << 10
        assert usage(binary).spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kind", "dtype", "each"),
    [
        ("fp8", "*u8", torch.float8_e4m3fn, 1),
        ("fp8", "*u8", torch.float8_e4m3fn, 2),
        ("fp8", "*u8", torch.float8_e4m3fn, 4),
        ("fp8", "*i16", torch.bfloat16, 1),
        ("fp8", "*i16", torch.bfloat16, 2),
        ("fp8", "*fp32", torch.float32, 2),
        ("f32", "*fp32", torch.float32, 1),
    ],
)
def test_index_logits_compile(form: Any, kind: str, dtype: torch.dtype, each: int) -> None:
    code = figures(logits_of(kind, dtype, IndexCodec(form=form), each=each))
    is_half = dtype != torch.float32
    assert (code.wgmma > 0) == is_half
    assert code.spilled <= (56 if each == 4 else 0)
    assert code.loop_spills <= (3 if each == 4 else 0)
    assert code.shared <= SHARED_MAX
    assert fills_a_multiprocessor(code, warps=8) or not is_half


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("capability", [89, 120])
def test_all_programs_fit_where_a_block_has_99_KiB(capability: int) -> None:
    where = place_of(capability)
    assert where.has_little
    for title, make, _ in report(capability):
        assert make().metadata.shared <= where.shared_bytes, title


@pytest.mark.slow
def test_the_largest_programs_fit_where_a_block_has_99_KiB() -> None:
    """Of attention, index logits and experts; with all their stages none of them would."""
    from ess.kernels.cuda.triton import grouped
    from ess.kernels.cuda.triton.shapes import NARROW

    where = place_of(89)
    for binary in (
        attention_of(NARROW, "bf16", capability=89),
        logits_of("*i16", torch.bfloat16, IndexCodec(), each=4, capability=89),
        products_of(grouped.MANY, torch.bfloat16, capability=89),
    ):
        assert 48 << 10 < binary.metadata.shared <= where.shared_bytes
    whole = place_of(90)
    assert (where.stages(4), where.stages(1), whole.stages(4)) == (2, 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, pytest.param(120, marks=pytest.mark.long)])
def test_index_logits_do_not_spill_where_a_block_has_99_KiB(capability: int) -> None:
    for each in (4,) if capability == 89 else (1, 2, 3, 4):
        code = figures(
            logits_of("*i16", torch.bfloat16, IndexCodec(), each=each, capability=capability)
        )
        assert (code.spilled, code.loop_spills) == (0, 0), each
        assert fills_a_multiprocessor(code, warps=8), each


@pytest.mark.slow
@pytest.mark.parametrize("weight", [torch.float8_e4m3fn, torch.bfloat16])
def test_experts_do_not_spill_and_as_many_programs_fit_as_are_launched(weight: torch.dtype) -> None:
    """A product of 64 columns, 16 deep, is one instruction; none is waited for alone."""
    from ess.kernels.cuda.triton.grouped import CANDIDATES

    is_fp8 = weight == torch.float8_e4m3fn
    for shape in {
        one for (fp8, _), shapes in CANDIDATES.items() if fp8 == is_fp8 for one in shapes
    }:
        code = figures(products_of(shape, weight))
        assert code.spilled == code.loop_spills == code.mma == 0
        assert code.wgmma * shape.warps // 4 == 16
        assert code.waits == 1
        assert code.copies > 0
        assert shape.programs * (code.shared + 1024) <= SHARED_MAX + 1024
        assert shape.programs * 32 * shape.warps * code.registers <= REGISTERS


@pytest.mark.slow
def test_experts_in_float32_compile_without_spills() -> None:
    from ess.kernels.cuda.triton.grouped import EXACT

    for weight in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        code = figures(products_of(EXACT, weight, token=torch.float32))
        assert code.spilled == 0
        assert code.wgmma == code.mma == 0


def test_the_small_kernels_compile_without_spills() -> None:
    from ess.kernels.cuda.triton import attend as attending
    from ess.kernels.cuda.triton.device import attend, partials, shares

    width = {"WIDTH": 512, "PADDED": 512}
    sides = types("*fp32: first_out first_lse second_out second_lse out lse")
    parts = types("*fp32: part_out part_lse out lse, *i32: cuts, i32: heads programs")
    piece = {"HEADS": 64, "LINES": attending.JOIN_LINES, "ADDS": True}
    shared = types("*i32: counts cuts pieces, i32: query_count head_blocks")
    lists = types("*i32: slots named counts, i32: width slot_stride")
    for binary in (
        top_k_of(),
        draw_of(),
        compiled(partials.merge, sides, width, enable_fp_fusion=False),
        compiled(partials.join, parts, width | piece),
        compiled(shares.lay_out, shared, {"KEYS": 64, "BLOCKS_MIN": 2, "IS_CUT": True}),
        compiled(attend.close_up, lists, {"BLOCK": 1024}),
    ):
        assert usage(binary).spilled == 0


@pytest.mark.slow
def test_the_shared_top_k_compiles_without_spills() -> None:
    from ess.kernels.cuda.triton import index
    from ess.kernels.cuda.triton.device import spread

    chunk = {"CHUNK": index.CHUNK}
    tally = SPREAD | types("*i32: tallies")
    census = tally | types("*i32: counts")
    take = SPREAD | types("*i32: counts out")
    for binary in (
        *(compiled(spread.tally, tally, chunk | {"LEVEL": n}, num_warps=8) for n in (0, 1, 3)),
        compiled(spread.census, census, chunk, num_warps=8),
        compiled(spread.take, take, chunk | {"CHUNKS": index.CHUNKS_MIN}, num_warps=8),
    ):
        assert usage(binary).spilled == 0


@pytest.mark.slow
def test_counts_and_strides_of_one_compile_too() -> None:
    """Triton makes a constant of every integer that is 1, so these are other programs."""
    from ess.kernels.cuda.triton import attend, index
    from ess.kernels.cuda.triton.device import attend as attention
    from ess.kernels.cuda.triton.device import index as keys
    from ess.kernels.cuda.triton.device import topk

    half = {"query_dtype": torch.bfloat16, "interpreted": False}
    rows = attend.constants(RowCodec(), **half)
    rows |= {"HEADS": 16, "KEYS": 16, "ADDS": True, "ALIGNED": 16}
    logits = index.constants(IndexCodec(), **half) | {"HEADS": 1, "HEADS_PADDED": 16, "GROUP": 1}
    for kernel, given, constants in (
        (attention.attend, ATTEND, rows),
        (keys.logits, LOGITS | {"queries": "*i16"}, logits | {"KEYS": 64}),
        (topk.top_k, TOP_K, {"ROOM": 1, "SAMPLE": 64, "BLOCK": 64}),
    ):
        ones = {name: 1 for name, kind in given.items() if kind == "i32"}
        others = {name: kind for name, kind in given.items() if name not in ones}
        assert compiled(kernel, others, constants | ones).asm["cubin"]


@pytest.mark.parametrize("kind", ["*fp32", "*i16"])
def test_what_finishes_rows_and_keys_compiles_without_spills(kind: str) -> None:
    for binary in finishes(kind):
        assert usage(binary).spilled == 0
        assert "ftz" not in binary.asm["ptx"]


@pytest.mark.parametrize("kind", ["*fp32", "*i16"])
def test_what_comes_to_experts_and_goes_compiles_without_spills(kind: str) -> None:
    from ess.kernels.cuda.triton.device import received

    sizes, is_half = {"WIDTH": 7168, "COLUMNS": 1024}, {"IS_BF16": kind == "*i16"}
    ends, given = types("*i32: ends, i32: last"), {"out": kind}
    for kernel, kinds, constants in (
        (received.take, {"tokens": kind, **types("*i64: lines, i32: token_stride"), **ends}, {}),
        (received.gate, {"both": kind, "limit": "fp32", **ends}, {"HAS_LIMIT": True, **is_half}),
        (
            received.add,
            {"made": kind, **types("*i64: places, *fp32: weights, i32: made_stride")},
            {"EACH": 8, "OUT_IS_BF16": kind == "*i16", **is_half},
        ),
    ):
        binary = compiled(kernel, kinds | given, sizes | constants, enable_fp_fusion=False)
        assert usage(binary).spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_dense_products_compile_without_spills(capability: int) -> None:
    """Codes meet codes on the tensor cores; the sums of 128 are waited for once."""
    from ess.kernels.cuda.triton.linear import SHAPES

    for shape in SHAPES:
        code = figures(linear_of(shape, capability=capability))
        assert code.spilled == code.loop_spills == code.mma == 0
        assert code.copies > 0
        assert code.shared <= SHARED_MAX
        if capability == 90:
            assert code.wgmma > 0
            assert code.waits == 1


@pytest.mark.parametrize("kind", ["*fp32", "*i16"])
def test_the_row_codec_compiles_and_keeps_subnormals(kind: str) -> None:
    from ess.kernels.cuda.triton import rows
    from ess.kernels.cuda.triton.device import rows as device

    shape = rows.row_shape(RowCodec()) | {"IS_BF16": kind == "*i16", "ROWS": rows.BLOCK_ROWS}
    strides = types("i32: count value_stride code_stride scale_stride page_stride")
    places = types("*u8: codes scales tails")
    for page in (0, 1, 64):
        encode = compiled(
            device.encode,
            {"values": kind, "places": "*i64", **places, **strides},
            shape | {"PAGE": page},
        )
        assert usage(encode).spilled == 0
        assert "ftz" not in encode.asm["ptx"]
    for name in ("GROUP_PADDED", "POWER_OF_TWO", "TAIL_IS_F32"):
        del shape[name]
    decode = compiled(
        device.decode,
        {**places, "values": kind, **types("i32: count row_stride value_stride")},
        shape | {"INTERPRETED": False},
    )
    assert usage(decode).spilled == 0
    assert "ftz" not in decode.asm["ptx"]


LOG = Path(__file__).resolve().parents[2] / "docs" / "log.md"
TABLE = "## Ops on CUDA, again"
NOT_THERE = {"cut of a vocabulary", "draw from a vocabulary"}


def held(at: int) -> Iterator[tuple[str, list[int]]]:
    """Of each kernel what the log's table says for the first target or the second."""
    section = LOG.read_text().split(TABLE)[1].split("\n## ")[0]
    for line in re.findall(r"^\| (.+) \|$", section, re.MULTILINE)[1:]:
        title, *cells = line.split(" | ")
        name = re.sub(r"(\w+) / (\w+)", lambda both: both[at + 1], title)
        yield name, [int(cell.split(" / ")[at].replace(",", "")) for cell in cells]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("at", "capability"), [(0, 90), (1, 100)])
def test_the_table_of_the_log_is_what_the_compiler_makes(at: int, capability: int) -> None:
    """Of the version of the compiler that the table names. Registers, shared bytes, spilled bytes,
    words spilled in the loop, its instructions."""
    import triton

    if not triton.__version__.startswith("3.6."):
        pytest.skip(f"the table is of Triton 3.6, and this is {triton.__version__}")
    made = {}
    for title, make, rows in report(capability):
        if title not in NOT_THERE:
            code = figures(make(), rows=rows)
            sizes = code.registers, code.shared, code.spilled, code.loop_spills
            made[title] = [*sizes, code.loop]
    assert made == dict(held(at))


def test_distances_between_partials_are_of_64_bits_whatever_they_are() -> None:
    """By value, a distance of less than 8 GiB would be another program, compiled in a capture."""
    from ess.kernels.cuda.triton.device import attend

    kinds = {param.name: param.annotation_type for param in attend.attend.params}
    names = ("placed_from", "part_from", "part_lse_from")
    assert [kinds[name] for name in names] == ["i64"] * 3


CHANGING = {
    *("count", "line_count", "query_count", "request_count", "expert_count", "each"),
    *("programs", "run_keys", "table_stride", "table_width"),
}
"""Numbers that follow from the batch or from its contexts."""


def test_no_program_is_of_a_batch_s_numbers() -> None:
    """A number that is 1, or a multiple of 16, would be another program: compiled while requests
    wait, and what loads a program while a graph is captured ends the capture."""
    from ess.kernels.cuda.triton import device

    met = set()
    for module in pkgutil.iter_modules(device.__path__, f"{device.__name__}."):
        for name, kernel in vars(importlib.import_module(module.name)).items():
            if name.startswith("_"):
                continue
            for param in getattr(kernel, "params", ()):
                if param.name in CHANGING:
                    assert param.do_not_specialize, f"{module.name}: {name} has {param.name}"
                    met.add(param.name)
    assert met == CHANGING


def test_lengths_of_a_half_are_read_by_the_same_program() -> None:
    """Those of a batch's second half may begin anywhere."""
    from ess.kernels.cuda.triton.device import index, spread, topk

    for kernel in (index.logits, topk.top_k, spread.tally, spread.census, spread.take):
        for param in kernel.params:
            if param.name in ("lengths", "table"):
                assert param.do_not_specialize_on_alignment, f"{kernel} has {param.name}"


def test_columns_of_a_draw_are_read_by_the_same_program() -> None:
    """They lie behind each other, so the batch decides where they begin."""
    from ess.kernels.cuda.triton.device import cut, noise

    flags = [
        param.do_not_specialize_on_alignment
        for kernel in (cut.cut, noise.draw)
        for param in kernel.params
        if param.name in ("top_k", "top_p")
    ]
    assert flags == [True] * 3


def test_no_logarithm_of_the_noise_is_an_approximation() -> None:
    """`lg2.approx` has an error of 2^-22 near 1, where the most noise is made."""
    assert "approx" not in draw_of().asm["ptx"]
