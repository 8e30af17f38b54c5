"""The records that compiled functions take, field for field as in the headers of csrc/cpu."""

from __future__ import annotations

import ctypes
from typing import Any, Final

_COUNT: Final = ctypes.c_int64
_POINTER: Final = ctypes.c_void_p

PART_COUNT: Final = 6
"""Parts of `Layer`."""


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class Matrix(ctypes.Structure):
    """`ess::Matrix` of kernels.h."""

    _fields_ = [*_fields(_POINTER, "base"), *_fields(_COUNT, "stride", "count")]


class Attend(ctypes.Structure):
    """`ess::Attend` of kernels.h."""

    _fields_ = [
        *_fields(_COUNT, "query_count", "head_count", "latent_dim", "rope_dim"),
        *_fields(_COUNT, "row_form", "query_form", "query_stride", "head_stride"),
        *_fields(_COUNT, "slot_count", "slot_stride", "plain_dim"),
        *_fields(Matrix, "rows", "placed"),
        *_fields(_POINTER, "queries", "slots", "out", "lse"),
        *_fields(ctypes.c_float, "scale"),
    ]


class Merge(ctypes.Structure):
    """`ess::Merge` of kernels.h."""

    _fields_ = [
        *_fields(_COUNT, "count", "dim"),
        *_fields(_POINTER * 2, "out", "lse"),
        *_fields(_POINTER, "into_out", "into_lse"),
    ]


class Index(ctypes.Structure):
    """`ess::Index` of kernels.h."""

    _fields_ = [
        *_fields(_COUNT, "query_count", "head_count", "key_dim", "key_form", "query_form"),
        *_fields(_COUNT, "query_stride", "head_stride", "table_width", "table_stride"),
        *_fields(Matrix, "pages"),
        *_fields(_POINTER, "queries", "weights", "table", "lengths"),
    ]


class Op(ctypes.Structure):
    """`ess::Op` of kernels.h."""

    _fields_ = [
        *_fields(_COUNT, "kind", "from_", "to", "from_at", "to_at", "in_dim", "out_dim"),
        *_fields(_COUNT, "count", "from_step", "to_step", "half", "bits"),
        *_fields(_POINTER, "weight", "more"),
        *_fields(ctypes.c_float, "value"),
    ]


class Experts(ctypes.Structure):
    """`ess::Experts` of kernels.h."""

    _fields_ = [
        *_fields(_COUNT, "expert_count", "group_count", "groups_kept", "per_token", "is_normed"),
        *_fields(_COUNT, "inner", "logits"),
        *_fields(_POINTER, "correction", "gate_up", "down"),
        *_fields(ctypes.c_float, "scale"),
    ]


class Stage(ctypes.Structure):
    """`ess::Stage` of kernels.h."""

    _fields_ = [
        ("ops", ctypes.POINTER(Op)),
        ("op_count", _COUNT),
        ("widths", ctypes.POINTER(_COUNT)),
        ("register_count", _COUNT),
    ]


class Bound(ctypes.Structure):
    """`ess::Bound` of kernels.h."""

    _fields_ = [*_fields(_POINTER, "base"), *_fields(_COUNT, "stride", "form")]


class Strides(ctypes.Structure):
    """`ess::Strides` of encoding.h."""

    _fields_ = [
        *_fields(_COUNT, "row_count", "group_count", "group_size", "tail_count"),
        *_fields(_COUNT, "power_of_two", "value_is_bf16"),
        *_fields(_COUNT, "value_stride", "row_stride", "scale_stride", "scale_is_byte"),
    ]


class Encoding(ctypes.Structure):
    """`ess::Encoding` of encoding.h."""

    _fields_ = [("strides", Strides), *_fields(_COUNT, "scale_at", "tail_at")]


class Append(ctypes.Structure):
    """`ess::Append` of keys.h."""

    _fields_ = [
        *_fields(_POINTER, "slab"),
        *_fields(_COUNT, "slot_count"),
        *_fields(_POINTER, "slots", "rows"),
        *_fields(_COUNT, "row_bytes", "count"),
        *_fields(_POINTER, "pages"),
        *_fields(_COUNT, "page_count"),
        *_fields(_POINTER, "row_ids", "keys"),
        *_fields(_COUNT, "value_bytes", "scale_bytes"),
    ]


class StepSide(ctypes.Structure):
    """`ess::StepSide` of layer.cpp."""

    _fields_ = [
        *_fields(_POINTER, "table"),
        *_fields(_COUNT, "table_width", "table_stride"),
        *_fields(_POINTER, "lengths", "lines", "row_ids", "hits"),
        *_fields(_COUNT, "query_count", "number"),
        *_fields(_COUNT * PART_COUNT, "taken"),
        *_fields(_COUNT, "planned_ns", "claimed_total"),
        *_fields(_POINTER, "ending", "ending_sides"),
        *_fields(_COUNT, "ending_ns"),
    ]


class Opening(ctypes.Structure):
    """`ess::Opening` of step.cpp."""

    _fields_ = [
        *_fields(_POINTER, "tables"),
        *_fields(_COUNT, "line_count", "table_width"),
        *_fields(_POINTER, "lines", "table", "turns"),
        *_fields(_COUNT, "turn_count", "turn_width"),
        *_fields(_POINTER, "positions", "cos", "sin"),
        *_fields(_COUNT, "query_count"),
    ]


class Layer(ctypes.Structure):
    """`ess::Layer` of layer.cpp."""

    _fields_ = [
        *_fields(_POINTER, "front", "front_sides", "ask", "ask_sides", "back", "back_sides"),
        ("append", Append),
        ("index", Index),
        ("attend", Attend),
        *_fields(_COUNT, "top_k"),
        *_fields(_POINTER, "selection", "located"),
        *_fields(_COUNT, "find"),
        *_fields(_POINTER, "arena", "split", "lookup", "host"),
        *_fields(_COUNT, "number", "ticket", "part", "stop"),
        *_fields(_COUNT, "claimed", "hit_total", "evicted_count"),
        *_fields(_COUNT * 2, "copied"),
        *_fields(_COUNT * PART_COUNT, "began", "ended"),
    ]
