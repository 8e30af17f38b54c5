"""Index logits and the exact top-k: the launches, which trust what they are given."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from ess.kernels.triton_ops.device import index as device
from ess.kernels.triton_ops.device import topk
from ess.kernels.triton_ops.launch import bits, on, place
from ess.layout import IndexCodec
from ess.units import PAGE_ROWS

DOT_MIN: Final = 16
RUN_KEYS: Final = 1024
SAMPLE: Final = 2048
ROOM_MIN: Final = 8192
BLOCK: Final = 2048
FORMS: Final = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.float32: "f32"}


class Placement(NamedTuple):
    """What turns a position into a slot, and where the slots go: all int32.

    Position p of query q is row table[q, p // 64] * 64 + p % 64; slot_of has a slot for every row.
    """

    slot_of: Tensor
    table: Tensor
    slots: Tensor


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
) -> Tensor:
    """By the contract of `reference.index_logits`, on a grid that leaves `spare_sms` alone."""
    where, width = place(queries), table.shape[1]
    if not len(queries) or not width:
        return out
    tasks = len(queries) * -(-width * PAGE_ROWS // RUN_KEYS)
    constant = constants(codec, query_dtype=queries.dtype, interpreted=where.interpreted)
    with on(queries):
        device.logits[(where.programs(tasks, spare_sms=spare_sms),)](
            *(bits(queries), weights, pages, table, lengths, out),
            *(*queries.stride()[:2], pages.stride(0), table.stride(0), out.stride(0)),
            *(len(queries), width),
            **constant,
            HEADS=queries.shape[1],
            HEADS_PADDED=max(DOT_MIN, triton.next_power_of_2(queries.shape[1])),
            **blocks(is_half=in_half(queries.dtype, codec)),
        )
    return out


def in_half(query_dtype: torch.dtype, codec: IndexCodec) -> bool:
    """Products in bfloat16, which holds e4m3 exactly."""
    return query_dtype != torch.float32 and codec.form == "fp8"


def blocks(*, is_half: bool) -> dict[str, int]:
    """Keys of a task and of a product, and what Triton makes of a program.

    In bfloat16 two programs do not fit on one multiprocessor: else the grid would not leave any of
    them alone. Float32 runs without tensor cores, for exactness; larger blocks of it spill.
    """
    if is_half:
        return {"RUN": RUN_KEYS, "KEYS": 256, "num_warps": 8, "num_stages": 3}
    return {"RUN": RUN_KEYS, "KEYS": 32, "num_warps": 8, "num_stages": 1}


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
    logits: Tensor, lengths: Tensor, *, out: Tensor, placement: Placement | None = None
) -> Tensor:
    """By the contract of `reference.top_k`; with a placement also the slot of every position."""
    count, k = out.shape
    if not count:
        return out
    room = max(ROOM_MIN, triton.next_power_of_2(2 * k)) if logits.shape[1] > ROOM_MIN else 1
    kept = torch.empty(count, room, device=logits.device)
    positions = torch.empty(count, room, dtype=torch.int32, device=logits.device)
    slot_of, table, slots = placement or Placement(out, out, out)
    with on(logits):
        topk.top_k[(count,)](
            *(logits, lengths, out, kept, positions, slots, slot_of, table),
            *(k, logits.stride(0), table.stride(0)),
            HAS_SLOTS=placement is not None,
            ROOM=room,
            SAMPLE=SAMPLE,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out
