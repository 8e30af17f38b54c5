"""The records that compiled functions take, field for field as in the headers of csrc/cpu."""

from __future__ import annotations

import ctypes
from typing import Any, Final

COUNT: Final = ctypes.c_int64
POINTER: Final = ctypes.c_void_p

PART_COUNT: Final = 6
"""Parts of `Layer`."""


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Neighbouring fields of one type."""
    return [(name, kind) for name in names]


class Matrix(ctypes.Structure):
    """`ess::Matrix` of kernels.h."""

    _fields_ = [*fields(POINTER, "base"), *fields(COUNT, "stride", "count")]


class Attend(ctypes.Structure):
    """`ess::Attend` of kernels.h."""

    _fields_ = [
        *fields(COUNT, "query_count", "head_count", "latent_dim", "rope_dim"),
        *fields(COUNT, "row_form", "query_form", "query_stride", "head_stride"),
        *fields(COUNT, "slot_count", "slot_stride", "plain_dim"),
        *fields(Matrix, "rows", "placed"),
        *fields(POINTER, "queries", "slots", "out", "lse"),
        *fields(ctypes.c_float, "scale"),
    ]


class Merge(ctypes.Structure):
    """`ess::Merge` of kernels.h."""

    _fields_ = [
        *fields(COUNT, "count", "dim"),
        *fields(POINTER * 2, "out", "lse"),
        *fields(POINTER, "into_out", "into_lse"),
    ]


class Index(ctypes.Structure):
    """`ess::Index` of kernels.h."""

    _fields_ = [
        *fields(COUNT, "query_count", "head_count", "key_dim", "key_form", "query_form"),
        *fields(COUNT, "query_stride", "head_stride", "table_width", "table_stride"),
        *fields(Matrix, "pages"),
        *fields(POINTER, "queries", "weights", "table", "lengths"),
    ]


class Op(ctypes.Structure):
    """`ess::Op` of kernels.h."""

    _fields_ = [
        *fields(COUNT, "kind", "from_", "to", "from_at", "to_at", "in_dim", "out_dim"),
        *fields(COUNT, "count", "from_step", "to_step", "half", "bits"),
        *fields(POINTER, "weight", "more"),
        *fields(ctypes.c_float, "value"),
    ]


class Experts(ctypes.Structure):
    """`ess::Experts` of kernels.h."""

    _fields_ = [
        *fields(COUNT, "expert_count", "group_count", "groups_kept", "per_token", "is_normed"),
        *fields(COUNT, "inner", "logits"),
        *fields(POINTER, "correction", "gate_up", "down"),
        *fields(ctypes.c_float, "scale"),
    ]


class Stage(ctypes.Structure):
    """`ess::Stage` of kernels.h."""

    _fields_ = [
        ("ops", ctypes.POINTER(Op)),
        ("op_count", COUNT),
        ("widths", ctypes.POINTER(COUNT)),
        ("register_count", COUNT),
    ]


class Bound(ctypes.Structure):
    """`ess::Bound` of kernels.h."""

    _fields_ = [*fields(POINTER, "base"), *fields(COUNT, "stride", "form")]


class Strides(ctypes.Structure):
    """`ess::Strides` of encoding.h."""

    _fields_ = [
        *fields(COUNT, "row_count", "group_count", "group_size", "tail_count"),
        *fields(COUNT, "power_of_two", "value_is_bf16"),
        *fields(COUNT, "value_stride", "row_stride", "scale_stride", "scale_is_byte"),
    ]


class Encoding(ctypes.Structure):
    """`ess::Encoding` of encoding.h."""

    _fields_ = [("strides", Strides), *fields(COUNT, "scale_at", "tail_at")]


class Append(ctypes.Structure):
    """`ess::Append` of keys.h."""

    _fields_ = [
        *fields(POINTER, "slab"),
        *fields(COUNT, "slot_count"),
        *fields(POINTER, "slots", "rows"),
        *fields(COUNT, "row_bytes", "count"),
        *fields(POINTER, "pages"),
        *fields(COUNT, "page_count"),
        *fields(POINTER, "row_ids", "keys"),
        *fields(COUNT, "value_bytes", "scale_bytes"),
    ]


class StepSide(ctypes.Structure):
    """`ess::StepSide` of layer.cpp."""

    _fields_ = [
        *fields(POINTER, "table"),
        *fields(COUNT, "table_width", "table_stride"),
        *fields(POINTER, "lengths", "lines", "row_ids", "hits"),
        *fields(COUNT, "query_count", "number"),
        *fields(COUNT * PART_COUNT, "taken"),
        *fields(COUNT, "planned_ns", "claimed_total"),
        *fields(POINTER, "ending", "ending_sides"),
        *fields(COUNT, "ending_ns"),
    ]


class Opening(ctypes.Structure):
    """`ess::Opening` of step.cpp."""

    _fields_ = [
        *fields(POINTER, "tables"),
        *fields(COUNT, "line_count", "table_width"),
        *fields(POINTER, "lines", "table", "turns"),
        *fields(COUNT, "turn_count", "turn_width"),
        *fields(POINTER, "positions", "cos", "sin"),
        *fields(COUNT, "query_count"),
    ]


class Layer(ctypes.Structure):
    """`ess::Layer` of layer.cpp."""

    _fields_ = [
        *fields(POINTER, "front", "front_sides", "ask", "ask_sides", "back", "back_sides"),
        ("append", Append),
        ("index", Index),
        ("attend", Attend),
        *fields(COUNT, "top_k"),
        *fields(POINTER, "selection", "located"),
        *fields(COUNT, "find"),
        *fields(POINTER, "arena", "split", "lookup", "host"),
        *fields(COUNT, "number", "ticket", "part", "stop"),
        *fields(COUNT, "claimed", "hit_total", "evicted_count"),
        *fields(COUNT * 2, "copied"),
        *fields(COUNT * PART_COUNT, "began", "ended"),
    ]
