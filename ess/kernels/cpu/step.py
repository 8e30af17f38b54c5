"""What a decode step needs beside its layers, natively (csrc/cpu/step.cpp)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.kernels.cpu import native, records

Ints = npt.NDArray[np.int32]


class Opened(IntEnum):
    """What `opened` has written: nothing that counts, for a line is not there; table lines; these
    and all angles."""

    ASTRAY = 0
    TABLE = 1
    ALL = 2


def places(
    tables: Ints, lengths: Ints, lines: Sequence[int], counts: Sequence[int]
) -> tuple[Ints, ...] | None:
    """For `counts` new tokens after the length of each line, query by query: its line, its number
    within its sequence, the length before, position, length with it, and row id. None where a line
    or a page is missing."""
    size, total = len(lines), sum(counts)
    columns = np.empty((6, total), np.int32)
    given = struct.pack(f"{2 * size}i", *lines, *counts)
    memory = native.address(tables), native.address(lengths), given, native.address(columns)
    done = _call("ess_places", 4, 4)(*memory, *tables.shape, size, total)
    return tuple(columns) if done else None


def turns(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [tokens, width] from a table [length, 2, width] of both; None where it
    lacks a position."""
    length, _, width = table.shape
    cos, sin = torch.empty(2, len(positions), width)
    pointers = table.data_ptr(), positions.data_ptr(), cos.data_ptr(), sin.data_ptr()
    done = _call("ess_turns", 4, 3)(*pointers, length, width, len(positions))
    return (cos, sin) if done else None


def embedded(table: Tensor, ids: Tensor) -> Tensor | None:
    """Rows of a table of bf16 or float32, as float32; None where the table lacks a row."""
    assert ids.dtype == torch.int64, f"ids of {ids.dtype}"
    assert table.is_contiguous(), f"a table with strides {table.stride()}"
    assert ids.is_contiguous(), f"ids with strides {ids.stride()}"
    (row_count, width), (count,) = table.shape, ids.shape
    made = torch.empty(count, width)
    pointers = table.data_ptr(), ids.data_ptr(), made.data_ptr()
    is_wide = table.dtype == torch.float32
    done = _call("ess_embed", 3, 4)(*pointers, is_wide, row_count, width, count)
    return made if done else None


def opened(opening: records.Opening) -> int:
    """Writes the page table lines and angles of a step's queries: which `Opened` says."""
    done: int = _open()(opening)
    return done


def best(logits: Tensor) -> Tensor:
    """The first place of the greatest logit in each float32 line; -1 if the line has a NaN."""
    assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
    assert logits.stride(1) == 1, f"logits with strides {logits.stride()}"
    count, width = logits.shape
    places = torch.empty(count, dtype=torch.int64)
    _call("ess_best", 2, 3)(logits.data_ptr(), places.data_ptr(), count, width, logits.stride(0))
    return places


@functools.cache
def _open() -> Callable[[records.Opening], int]:
    return native.function("ess_open", [ctypes.POINTER(records.Opening)], ctypes.c_int32)


@functools.cache
def _call(name: str, pointer_count: int, integer_count: int) -> Callable[..., Any]:
    types = [ctypes.c_void_p] * pointer_count + [ctypes.c_int64] * integer_count
    return native.function(name, types, ctypes.c_int32)
