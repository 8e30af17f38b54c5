"""What the compiler makes of the kernels for a device that is not there.

`python -m tests.support.compiled [word ...]` prints a line for each Triton kernel and shape whose
title has one of the words: registers and spilled bytes of a thread, shared memory, and of the
innermost loop with products its instructions, spills, tensor core products, waits for them,
asynchronous copies and barriers; and, where a turn of that loop takes so many rows or keys, the
requests for a line of 128 bytes that it makes for each of them, if lanes lie side by side. Behind
them are the CUDA programs of serving, as `tests.support.machine_code` prints them.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ess.kernels.cuda.triton import attend, cut, finish, grouped, index, linear, noise
from ess.kernels.cuda.triton.device import attend as attention
from ess.kernels.cuda.triton.device import cut as cutting
from ess.kernels.cuda.triton.device import finish as finishing
from ess.kernels.cuda.triton.device import grouped as experts
from ess.kernels.cuda.triton.device import index as keys
from ess.kernels.cuda.triton.device import linear as dense
from ess.kernels.cuda.triton.device import noise as drawing
from ess.kernels.cuda.triton.device import topk
from ess.kernels.cuda.triton.launch import FUSED, SHARED_BYTES, Place
from ess.kernels.cuda.triton.shapes import CANDIDATES, Shape, candidates
from ess.layout import IndexCodec, RowCodec, RowForm
from tests.support import machine_code

LINE_BYTES = 128
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)(.*?);", re.MULTILINE
)
# By four warps (Hopper) or a whole program (Blackwell), and by a warp of its own.
GROUPED = ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")
SINGLE = ("HMMA", "QMMA")
BACK = re.compile(r"0x([0-9a-f]+)")


def types(text: str) -> dict[str, str]:
    """`*i32: a b, i32: c` as what Triton wants."""
    return {
        name: kind.strip()
        for group in text.split(",")
        for kind, names in [group.split(":")]
        for name in names.split()
    }


ATTEND = types(
    "*i16: queries, *u8: rows, *i32: named cuts pieces, *fp32: out lse, fp32: scale,"
    "i64: placed_from part_from part_lse_from,"
    "i32: row_stride placed_stride query_stride head_stride heads width"
)
LOGITS = types(
    "*u8: queries pages, *fp32: weights out, *i32: table lengths, i32: query_stride head_stride"
    " page_stride table_stride out_stride request_count each table_width run_keys"
)
PRODUCTS = types("*i32: begin ends, *fp32: scales, i32: token_stride out_stride expert_count")
LINEAR = types("*u8: codes weights, *fp32: sizes scales, *i16: out, i32: count out_stride")
TOP_K = types("*fp32: logits kept, *i32: lengths out positions, i32: k logit_stride")
CUT = types(
    "*fp32: scores top_p log_min_p out kept, *i64: top_k, *i32: positions,"
    "i32: width score_stride out_stride"
)
DRAW = types("*fp32: scores, *i64: top_k seeds positions tokens, i32: width score_stride")
TURN = types(
    "*fp32: cos sin, *i16: out, i32: line_count heads token_stride head_stride, fp32: factor"
)
FINISH_KEYS = types(
    "*fp32: weight bias cos sin, *u8: codes scales, *i32: places, fp32: eps factor,"
    "i32: count value_stride code_stride scale_stride page_stride"
)
FINISH_ROWS = types(
    "*fp32: weight cos sin, *u8: rows, *i32: places, i32: value_stride row_stride, fp32: eps"
)
POINTERS = {torch.bfloat16: "*i16", torch.float8_e4m3fn: "*u8", torch.float32: "*fp32"}


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    capability: int = 90,
    **options: Any,
) -> Any:
    """Pointers and the strides of rows are multiples of 16, as in a model they are."""
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
    options = {**FUSED, **options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def place_of(capability: int) -> Place:
    """A device of so much shared memory for a block as NVIDIA's tables have."""
    shared = 99 << 10 if capability in (89, 120, 121) else SHARED_BYTES
    return Place(132, False, capability // 10, shared)


def options_of(shape: Any, capability: int) -> dict[str, Any]:
    """What Triton makes of a shape on such a device."""
    stages = place_of(capability).stages(shape.stages)
    return {"num_warps": shape.warps, "num_stages": stages, "capability": capability}


class Usage(NamedTuple):
    registers: int
    spilled: int
    shared: int


class Figures(NamedTuple):
    registers: int
    spilled: int
    shared: int
    loop: int
    loop_spills: int
    wgmma: int
    mma: int
    waits: int
    copies: int
    barriers: int
    lines: float = math.nan


def usage(binary: Any) -> Usage:
    """The binary's own words on a thread."""
    said = _said("-res-usage", binary)
    registers, spilled = (int(re.findall(rf"{each}:(\d+)", said)[-1]) for each in ("REG", "STACK"))
    return Usage(registers, spilled, binary.metadata.shared)


def figures(binary: Any, *, rows: int = 0) -> Figures:
    """These words, and counts over the binary's innermost loop with products, of which a turn takes
    so many `rows`. Its instructions are half a second of the disassembler's."""
    code = INSTRUCTION.findall(_said("-sass", binary))
    loop = _loop([(int(at, 16), name, rest) for at, name, rest in code])

    def count(*starts: str) -> int:
        return sum(name.startswith(starts) for name in loop)

    counts = count("STL", "LDL"), count(*GROUPED), count(*SINGLE), count("WARPGROUP.DEPBAR")
    asked = sum(map(bytes_read, loop)) * 32 * binary.metadata.num_warps
    return Figures(
        *(*usage(binary), len(loop), *counts),
        *(count("LDGSTS"), count("BAR"), asked / LINE_BYTES / rows if rows else math.nan),
    )


def bytes_read(name: str) -> int:
    """Of global memory, by one thread."""
    if not name.startswith(("LDG", "LDGSTS")):
        return 0
    bits = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
    return next((bits[part] for part in name.split(".") if part in bits), 32) // 8


def _said(about: str, binary: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        command = [TOOLS / "cuobjdump", about, path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loop(code: list[tuple[int, str, str]]) -> list[str]:
    """The instructions from a jump back to where it goes: the shortest with a product."""
    bodies = [[name for _, name, _ in code]]
    for at, name, rest in code:
        target = BACK.search(rest)
        if name == "BRA" and target and int(target[1], 16) < at:
            body = [one for place, one, _ in code if int(target[1], 16) <= place <= at]
            if any(one.startswith(GROUPED + SINGLE) for one in body):
                bodies.append(body)
    return min(bodies, key=len)


def attention_of(shape: Shape, form: RowForm, *, adds: bool = False, capability: int = 90) -> Any:
    given = attend.constants(RowCodec(form=form), query_dtype=torch.bfloat16, interpreted=False)
    given |= {"HEADS": shape.heads, "KEYS": shape.keys, "ADDS": adds, "ALIGNED": 16}
    return compiled(attention.attend, ATTEND, given, **options_of(shape, capability))


def logits_shape_of(each: int, *, capability: int, is_half: bool = True) -> index.LogitsShape:
    return index.logits_shape(
        is_half=is_half, queries_per_request=each, has_little=place_of(capability).has_little
    )


def logits_of(
    kind: str, dtype: torch.dtype, codec: IndexCodec, *, each: int = 1, capability: int = 90
) -> Any:
    """A count of one is a constant for Triton."""
    is_half = index.in_half(dtype, codec)
    shape = logits_shape_of(each, is_half=is_half, capability=capability)
    given = index.constants(codec, query_dtype=dtype, interpreted=False)
    given |= {"HEADS": 64, "HEADS_PADDED": 64, "KEYS": shape.keys}
    given |= {"GROUP": triton.next_power_of_2(shape.each)}
    names = LOGITS | {"queries": kind}
    if shape.each == 1:
        del names["each"]
        given["each"] = 1
    return compiled(keys.logits, names, given, **options_of(shape, capability))


def products_of(
    shape: grouped.Shape,
    weight: torch.dtype,
    *,
    token: torch.dtype = torch.bfloat16,
    capability: int = 90,
) -> Any:
    """Of 32 experts as wide and deep as those of DeepSeek-V3.2."""
    weights = torch.empty(32, 4096, 7168, dtype=weight, device="meta")
    given = grouped.constants(weights, token, token, interpreted=False) | grouped.tile(shape)
    given["HAS_BEGIN"] = False
    pointers = {"tokens": POINTERS[token], "weights": POINTERS[weight], "out": POINTERS[token]}
    names = PRODUCTS | pointers
    return compiled(experts.products, names, given, **options_of(shape, capability))


def linear_of(shape: linear.Shape, *, capability: int = 90) -> Any:
    """The query projection of DeepSeek-V3.2."""
    given = linear.constants(24576, 1536, torch.bfloat16, interpreted=False)
    given |= {"TOKENS": shape.tokens, "COLUMNS": shape.columns, "TURNED": shape.turned}
    return compiled(dense.linear, LINEAR, given, **options_of(shape, capability))


def finishes(kind: str, *, capability: int = 90) -> Iterator[Any]:
    """What turns queries, finishes keys and finishes rows, from values of this kind."""
    options: dict[str, Any] = {"enable_fp_fusion": False, "capability": capability}
    is_half, keys_of = {"IS_BF16": kind == "*i16"}, finish.key_shape(IndexCodec(), rope=64)
    turns = {name: keys_of[name] for name in ("DIM", "PADDED", "ROPE", "IS_HALF", "LEVELS")}
    turns |= {"OUT_IS_BF16": True, "LINES": finish.LINES}
    paged = keys_of | {"PAGE": 64, "LINES": finish.LINES}
    rows = finish.row_shape(RowCodec()) | {"HAS_PLACES": True}
    yield compiled(finishing.turn, TURN | {"values": kind}, turns | is_half, **options)
    yield compiled(
        finishing.finish_keys, FINISH_KEYS | {"values": kind}, paged | is_half, **options
    )
    yield compiled(finishing.finish_rows, FINISH_ROWS | {"values": kind}, rows | is_half, **options)


def top_k_of(*, capability: int = 90) -> Any:
    given = {"ROOM": index.ROOM, "SAMPLE": index.SAMPLE, "BLOCK": index.BLOCK}
    return compiled(topk.top_k, TOP_K, given, capability=capability, num_warps=8)


def cut_of(*, capability: int = 90) -> Any:
    sizes = {"ROOM": cut.ROOM, "SAMPLE": cut.SAMPLE, "BLOCK": cut.BLOCK, "PART": cut.PART}
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    return compiled(cutting.cut, CUT, sizes, capability=capability, **options)


def draw_of(*, capability: int = 90) -> Any:
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    return compiled(drawing.draw, DRAW, {"BLOCK": noise.BLOCK}, capability=capability, **options)


class Title(NamedTuple):
    """A kernel of the table; a turn of its loop takes so many `rows`, where it takes rows."""

    text: str
    make: Callable[[], Any]
    rows: int = 0


def report(capability: int) -> Iterator[Title]:
    """The shapes in use."""
    given: dict[str, Any] = {"capability": capability}
    for form, heads in CANDIDATES:
        where = place_of(capability)
        at = {"generation": where.generation, "has_little": where.has_little}
        shape, *_ = candidates(form=form, heads=heads, is_half=True, **at)
        for adds in (False, True):
            name = f"attend {form} to {heads} heads: {shape.name}{', adds' * adds}"
            yield Title(name, partial(attention_of, shape, form, adds=adds, **given), shape.keys)
    for each in (1, 2, 4):
        taken = logits_shape_of(each, **given).keys
        make = partial(logits_of, "*i16", torch.bfloat16, IndexCodec(), each=each, **given)
        yield Title(f"index logits of {each} a request", make, taken)
    yield Title("top-k of a list", partial(top_k_of, **given))
    yield Title("cut of a vocabulary", partial(cut_of, **given))
    yield Title("draw from a vocabulary", partial(draw_of, **given))
    for (is_fp8, tokens), (used, *_) in grouped.CANDIDATES.items():
        weight = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        name = f"experts {'fp8' if is_fp8 else 'bf16'} to {tokens} tokens: {used.name}"
        yield Title(name, partial(products_of, used, weight, **given))
    for dense_shape in linear.SHAPES:
        yield Title(f"linear fp8: {dense_shape.name}", partial(linear_of, dense_shape, **given))
    for at, name in enumerate(("turn index queries", "finish keys", "finish rows")):
        yield Title(name, partial(_finish, at, **given))


def _finish(at: int, **given: Any) -> Any:
    return next(islice(finishes("*fp32", **given), at, None))


def main(words: list[str]) -> None:
    for target in (90, 100):
        print(f"{f'sm_{target}a':<42}", *(f"{field:>11}" for field in Figures._fields))
        for title, make, rows in report(target):
            if not words or any(word in title for word in words):
                row = (f"{field:>11.7g}" for field in figures(make(), rows=rows))
                print(f"{title:<42}", *row, flush=True)
    machine_code.main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
