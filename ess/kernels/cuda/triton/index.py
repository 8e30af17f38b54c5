"""Index logits and the exact top-k: the launches, which trust what they are given."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from ess.kernels.checks import check_shared
from ess.kernels.cuda.triton.device import index as device
from ess.kernels.cuda.triton.device import spread, topk
from ess.kernels.cuda.triton.launch import FORMS, FUSED, bits, on, place
from ess.layout import IndexCodec
from ess.units import PAGE_ROWS, div_ceil

DOT_MIN: Final = 16
RUN_KEYS_MIN: Final = 1024
RUN_KEYS_MAX: Final = 8192
FILLED: Final = 8
SHARED_BY: Final = (1, 2, 3, 4)
SAMPLE: Final = 2048
ROOM: Final = 8192
BLOCK: Final = 2048
CHUNK: Final = 4096
CHUNKS_MIN: Final = 256
"""One program up to contexts of a million: prompts have any width."""
EIGHT_WARPS: Final[dict[str, Any]] = {"num_warps": 8, **FUSED}
SPREAD_LISTS_MAX: Final = 64
SPREAD_WIDTH_MIN: Final = 16 << 10


def logits_into(
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    codec: IndexCodec,
    *,
    out: Tensor,
    spare_sms: int = 0,
    queries_per_request: int = 1,
) -> Tensor:
    """`Ops.index_logits` on a grid that leaves `spare_sms` alone; what is behind a length is not
    written.

    With several queries per request, those of a request lie beside each other and name the same
    pages: they share one read of the keys, and each gets the bits that it would get alone.
    """
    check_shared(len(queries), queries_per_request)
    where, width = place(queries), table.shape[1]
    if not len(queries) or not width:
        return out
    shape = logits_shape(
        is_half=in_half(queries.dtype, codec),
        queries_per_request=queries_per_request,
        has_little=where.has_little,
    )
    requests = len(queries) // shape.each
    programs = where.programs(1 << 30, spare_sms=spare_sms)
    run = run_keys(width * PAGE_ROWS, request_count=requests, programs=programs)
    tasks = requests * div_ceil(width * PAGE_ROWS, run)
    constant = constants(codec, query_dtype=queries.dtype, interpreted=where.interpreted)
    with on(queries):
        device.logits[(min(tasks, programs),)](
            *(bits(queries), weights, pages, table, lengths, out),
            *(*queries.stride()[:2], pages.stride(0), table.stride(0), out.stride(0)),
            *(requests, shape.each, width, run),
            **constant,
            HEADS=queries.shape[1],
            HEADS_PADDED=max(DOT_MIN, triton.next_power_of_2(queries.shape[1])),
            GROUP=triton.next_power_of_2(shape.each),
            KEYS=shape.keys,
            num_warps=shape.warps,
            num_stages=where.stages(shape.stages),
            **FUSED,
        )
    return out


def run_keys(width: int, *, request_count: int, programs: int) -> int:
    """Keys of a task: few tasks start seldom, many fill the device."""
    run = RUN_KEYS_MIN
    while run < RUN_KEYS_MAX and request_count * div_ceil(width, 2 * run) >= FILLED * programs:
        run *= 2
    return run


def in_half(query_dtype: torch.dtype, codec: IndexCodec) -> bool:
    """Products in bfloat16, which holds e4m3 exactly."""
    return query_dtype != torch.float32 and codec.form == "fp8"


class LogitsShape(NamedTuple):
    """How many queries share their keys, how many keys a product has, and Triton's options."""

    each: int
    keys: int
    warps: int
    stages: int


def logits_shape(*, is_half: bool, queries_per_request: int, has_little: bool) -> LogitsShape:
    """In bfloat16 two programs do not fit on one multiprocessor: if they did, a smaller grid would
    not leave multiprocessors free. Float32 runs without tensor cores, for exactness; there larger
    blocks spill. So do larger blocks for three and four queries where a device `has_little` shared
    memory: its products keep all their sums in registers.
    """
    if not is_half:
        return LogitsShape(each=1, keys=32, warps=8, stages=1)
    each = max(count for count in SHARED_BY if queries_per_request % count == 0)
    keys = 256 if each == 1 else 64 if has_little and each > 2 else 128
    return LogitsShape(each=each, keys=keys, warps=8, stages=3)


def constants(
    codec: IndexCodec, *, query_dtype: torch.dtype, interpreted: bool
) -> dict[str, int | bool | str]:
    """What the kernel is compiled for, apart from heads and block sizes."""
    return {
        "DIM": codec.key_dim,
        "DIM_PADDED": max(DOT_MIN, triton.next_power_of_2(codec.key_dim)),
        "IS_FP8": codec.form == "fp8",
        "QUERY_FORM": FORMS[query_dtype],
        "IN_BF16": in_half(query_dtype, codec) and not interpreted,
        "INTERPRETED": interpreted,
        "PRECISION": "ieee",
    }


def top_k_into(
    logits: Tensor,
    lengths: Tensor,
    *,
    out: Tensor,
    spreads: bool | None = None,
) -> Tensor:
    """By the contract of `Ops.top_k`.

    With `spreads` several programs share a list, by default where there are few and long ones. The
    result is the same either way.
    """
    (count, k), width = out.shape, logits.shape[1]
    if not count:
        return out
    if spreads is None:
        spreads = count <= SPREAD_LISTS_MAX and width >= SPREAD_WIDTH_MIN
    with on(logits):
        if spreads and k <= width:
            _spread(logits, lengths, out)
        else:
            _apart(logits, lengths, out)
    return out


def _apart(logits: Tensor, lengths: Tensor, out: Tensor) -> None:
    """One program for a list."""
    count, k = out.shape
    room = ROOM if logits.shape[1] > ROOM else 1
    kept = torch.empty(count, room, device=logits.device)
    positions = torch.empty(count, room, dtype=torch.int32, device=logits.device)
    topk.top_k[(count,)](
        *(logits, lengths, out, kept, positions, k, logits.stride(0)),
        ROOM=ROOM,
        SAMPLE=SAMPLE,
        BLOCK=BLOCK,
        **EIGHT_WARPS,
    )


def _spread(logits: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Many programs for a list, in six launches."""
    count, k = out.shape
    grid = count, div_ceil(logits.shape[1], CHUNK)
    whole: dict[str, Any] = {"dtype": torch.int32, "device": logits.device}
    tallies, known = torch.zeros(count, 4, 256, **whole), torch.empty(count, 4, 2, **whole)
    counts = torch.empty(*grid, 2, **whole)
    read, sizes = (logits, lengths), (k, logits.stride(0))
    for level in range(4):
        spread.tally[grid](*read, tallies, known, *sizes, LEVEL=level, CHUNK=CHUNK, **EIGHT_WARPS)
    spread.census[grid](*read, tallies, known, counts, *sizes, CHUNK=CHUNK, **EIGHT_WARPS)
    spread.take[grid](
        *(*read, known, counts, out, *sizes),
        CHUNK=CHUNK,
        CHUNKS=max(CHUNKS_MIN, triton.next_power_of_2(grid[1])),
        **EIGHT_WARPS,
    )
