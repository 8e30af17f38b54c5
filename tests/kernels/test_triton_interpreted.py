"""The Triton kernels where there is no GPU: run by the interpreter, and compiled for sm_90.

The interpreter runs what the kernels say, in float32; the compiler for a device that is not there
says whether they can be said at all, what they spill, and which instructions they become.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ess.layout import IndexCodec, RowCodec

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    "test_attend.py::test_agrees_for_every_form[cuda-f32-28-dtype0]",
    "test_attend.py::test_one_key_returns_its_value[cuda-656-dtype1]",
    "test_attend.py::test_nothing_named_is_empty[cuda-1152]",
    "test_attend.py::test_bad_input_changes_nothing[cuda]",
    "test_reference.py::test_index_logits_are_the_loop[cuda-ue8m0]",
    "test_reference.py::test_index_logits_are_the_loop[cuda-f32]",
    "test_reference.py::test_top_k_is_the_sort[cuda-2-7]",
    "test_reference.py::test_selection_attention_and_merge_join[cuda]",
    "test_rowcodec.py::test_golden_row[cuda]",
    "test_rowcodec.py::test_bytes_are_those_of_the_specification[cuda-656-dtype0]",
    "test_rowcodec.py::test_bytes_are_those_of_the_specification[cuda-1152-dtype1]",
    "test_indexcodec.py::test_keys_are_those_of_the_specification[cuda-f32-scale-20-dtype1]",
    "test_triton_ops.py::test_lists_close_up_in_their_order[cuda]",
    "test_triton_ops.py::test_positions_become_slots[cuda]",
    "test_triton_ops.py::test_rows_are_copied_as_far_as_the_count[cuda]",
    "test_triton_ops.py::test_keys_go_to_their_pages_in_one_step[cuda-dtype0]",
)
# What a GPU runs of these files, but for what takes the interpreter minutes.
MOST = {
    "attend": "cuda and not bits",
    "index": "cuda and (bad_input or (hard_lists and 1000))",
    "reference": "cuda",
    "rowcodec": "cuda",
    "indexcodec": "cuda",
    "triton_ops": "cuda",
}


def run_interpreted(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.interpreted", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return run.stdout


def test_the_interpreter_agrees_on_a_few() -> None:
    printed = run_interpreted(*(f"tests/kernels/{one}" for one in QUICK))
    assert re.search(rf"\b{len(QUICK)} passed in ", printed), printed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), MOST.items(), ids=MOST)
def test_the_interpreter_agrees(name: str, which: str) -> None:
    printed = run_interpreted(f"tests/kernels/test_{name}.py", "-k", which, "-m", "not slow")
    assert re.search(r"\d+ passed", printed), printed
    assert "skipped" not in printed


# ---- compiled for a device that is not there ----


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """For sm_90. Pointers and the strides of rows are multiples of 16, as in a model they are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    assert set(types) | set(constants) == set(names)
    aligned = [
        name
        for name, kind in types.items()
        if kind.startswith("*") or name.endswith(("_stride", "_from"))
    ]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def stack_bytes(binary: Any, folder: Path) -> int:
    """What a thread spills, as the binary says."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    return int(re.findall(r"STACK:(\d+)", said.stdout)[-1])


def types(text: str) -> dict[str, str]:
    """`*i32: a b, i32: c` as what Triton wants."""
    return {
        name: kind.strip()
        for group in text.split(",")
        for kind, names in [group.split(":")]
        for name in names.split()
    }


ATTEND = types(
    "*i16: queries, *u8: rows, *i32: named counts, *fp32: out lse, fp32: scale, i64: placed_from,"
    "i32: row_stride placed_stride query_stride head_stride query_count heads width"
    " splits split_keys"
)
LOGITS = types(
    "*u8: queries pages, *fp32: weights out, *i32: table lengths, i32: query_stride head_stride"
    " page_stride table_stride out_stride query_count table_width"
)
TOP_K = types(
    "*fp32: logits kept, *i32: lengths out positions slots slot_of table,"
    "i32: k logit_stride table_stride"
)
COPY = types(
    "*i64: source target, *i32: source_rows target_rows count, i32: source_stride target_stride"
)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("form", "adds"), [("fp8", False), ("fp8", True), ("bf16", False)])
def test_attention_compiles_to_tensor_core_instructions(
    form: Any, adds: bool, heads: int, tmp_path: Path
) -> None:
    from ess.kernels.triton_ops import attend
    from ess.kernels.triton_ops.device import attend as device

    codec, shape = RowCodec(form=form), attend.shape_for(heads=heads, is_half=True)
    binary = compiled(
        device.attend,
        ATTEND,
        attend.constants(codec, query_dtype=torch.bfloat16, interpreted=False)
        | {"HEADS": shape.heads, "KEYS": shape.keys, "ADDS": adds},
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    assert binary.metadata.shared <= 227 << 10
    product = "wgmma.mma_async" if shape.heads >= 64 else "mma.sync"
    assert product in binary.asm["ptx"]
    assert "cp.async" in binary.asm["ptx"]
    assert stack_bytes(binary, tmp_path) <= 400


@pytest.mark.slow
def test_attention_in_float32_compiles_without_spills(tmp_path: Path) -> None:
    from ess.kernels.triton_ops import attend
    from ess.kernels.triton_ops.device import attend as device

    for form in ("fp8", "f32"):
        shape = attend.shape_for(heads=128, is_half=False)
        binary = compiled(
            device.attend,
            ATTEND | {"queries": "*fp32"},
            attend.constants(RowCodec(form=form), query_dtype=torch.float32, interpreted=False)
            | {"HEADS": shape.heads, "KEYS": shape.keys, "ADDS": False},
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        assert binary.metadata.shared <= 227 << 10
        assert stack_bytes(binary, tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "kind", "dtype"),
    [
        ("fp8", "*u8", torch.float8_e4m3fn),
        ("fp8", "*i16", torch.bfloat16),
        ("fp8", "*fp32", torch.float32),
        ("f32", "*fp32", torch.float32),
    ],
)
def test_index_logits_compile(form: Any, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from ess.kernels.triton_ops import index
    from ess.kernels.triton_ops.device import index as device

    is_half = index.in_half(dtype, IndexCodec(form=form))
    given = index.constants(IndexCodec(form=form), query_dtype=dtype, interpreted=False)
    given |= {"HEADS": 64, "HEADS_PADDED": 64} | index.blocks(is_half=is_half)
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    binary = compiled(device.logits, LOGITS | {"queries": kind}, given, **options)
    assert ("wgmma.mma_async" in binary.asm["ptx"]) == is_half
    assert stack_bytes(binary, tmp_path) == 0
    assert 113 << 10 < binary.metadata.shared <= 227 << 10 or not is_half


def test_the_small_kernels_compile_without_spills(tmp_path: Path) -> None:
    from ess.kernels.triton_ops import copy, index
    from ess.kernels.triton_ops.device import attend, partials, topk
    from ess.kernels.triton_ops.device import copy as device

    sizes = {"ROOM": index.ROOM_MIN, "SAMPLE": index.SAMPLE, "BLOCK": index.BLOCK}
    width = {"WIDTH": 512, "PADDED": 512}
    sides = types("*fp32: first_out first_lse second_out second_lse out lse")
    parts = types("*fp32: part_out part_lse out lse, *i32: counts, i32: heads splits split_keys")
    lists = types("*i32: slots named counts, i32: width slot_stride")
    for binary in (
        compiled(topk.top_k, TOP_K, sizes | {"HAS_SLOTS": True}, num_warps=8),
        compiled(partials.merge, sides, width, enable_fp_fusion=False),
        compiled(partials.join, parts, width),
        compiled(attend.close_up, lists, {"BLOCK": 1024}),
        compiled(device.copy_rows, COPY, {"WORDS": 82, "BLOCK": copy.BLOCK}, num_warps=16),
    ):
        assert stack_bytes(binary, tmp_path) == 0


@pytest.mark.slow
def test_counts_and_strides_of_one_compile_too() -> None:
    """Triton makes a constant of every integer that is 1, so these are other programs."""
    from ess.kernels.triton_ops import attend, index
    from ess.kernels.triton_ops.device import attend as attention
    from ess.kernels.triton_ops.device import copy, topk
    from ess.kernels.triton_ops.device import index as keys

    half = {"query_dtype": torch.bfloat16, "interpreted": False}
    rows = attend.constants(RowCodec(), **half) | {"HEADS": 16, "KEYS": 16, "ADDS": True}
    logits = index.constants(IndexCodec(), **half) | {"HEADS": 1, "HEADS_PADDED": 16}
    for kernel, given, constants in (
        (attention.attend, ATTEND, rows),
        (keys.logits, LOGITS | {"queries": "*i16"}, logits | {"RUN": 64, "KEYS": 64}),
        (topk.top_k, TOP_K, {"HAS_SLOTS": True, "ROOM": 1, "SAMPLE": 64, "BLOCK": 64}),
        (copy.copy_rows, COPY, {"WORDS": 82, "BLOCK": 64}),
    ):
        ones = {name: 1 for name, kind in given.items() if kind == "i32"}
        others = {name: kind for name, kind in given.items() if name not in ones}
        assert compiled(kernel, others, constants | ones).asm["cubin"]


@pytest.mark.parametrize("kind", ["*fp32", "*i16"])
def test_the_row_codec_compiles_and_keeps_subnormals(kind: str, tmp_path: Path) -> None:
    from ess.kernels.triton_ops import rows
    from ess.kernels.triton_ops.device import rows as device

    shape = rows.row_shape(RowCodec()) | {"IS_BF16": kind == "*i16", "ROWS": rows.BLOCK_ROWS}
    strides = types("i32: count value_stride code_stride scale_stride page_stride")
    places = types("*u8: codes scales tails")
    for is_paged in (False, True):
        encode = compiled(
            device.encode,
            {"values": kind, "row_ids": "*i64", **places, **strides},
            shape | {"POWER_OF_TWO": True, "IS_PAGED": is_paged},
        )
        assert stack_bytes(encode, tmp_path) == 0
        assert "ftz" not in encode.asm["ptx"]
    del shape["GROUP_PADDED"]
    decode = compiled(
        device.decode,
        {**places, "values": kind, **types("i32: count row_stride value_stride")},
        shape | {"INTERPRETED": False},
    )
    assert stack_bytes(decode, tmp_path) == 0
    assert "ftz" not in decode.asm["ptx"]
