"""The door: row matrices and index lists of any library become addresses, checked once.

NumPy arrays and torch tensors are told apart by `data_ptr`, so that torch need not be installed.
Indices are looked at later, by whoever copies, in the same call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, Unavailable
from ess.kernels.native import address
from ess.kernels.streams import IndexList, RowCopy, RowMatrix, Tensor

_INDEX_DTYPES: Final = ("int32", "int64")


@dataclass(frozen=True, slots=True)
class Side:
    """One matrix and its list. `owner` keeps the memory alive as long as the side is."""

    name: str
    owner: object
    address: int
    row_count: int
    row_bytes: int
    stride_bytes: int
    rows: npt.NDArray[Any] | None

    @property
    def count(self) -> int:
        return self.row_count if self.rows is None else len(self.rows)

    def row_numbers(self) -> npt.NDArray[Any]:
        return np.arange(self.row_count) if self.rows is None else self.rows

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """The matrix itself, row by row, as bytes that may be written."""
        shape, strides = (self.row_count, self.row_bytes), (self.stride_bytes, 1)
        if self.row_count == 0:
            return np.empty(shape, np.uint8)
        span = (self.row_count - 1) * self.stride_bytes + self.row_bytes
        memory = memoryview((ctypes.c_char * span).from_address(self.address))
        return np.ndarray(shape, np.uint8, memory, 0, strides)

    def fault(self, place: int, row: int) -> BadInput:
        return BadInput(
            f"{self.name}_rows[{place}] is {row}, outside -1..{self.row_count - 1} of {self.name}"
        )


@dataclass(frozen=True, slots=True)
class CheckedCopy:
    source: Side
    target: Side

    @property
    def count(self) -> int:
        return self.source.count

    def with_own_lists(self) -> CheckedCopy:
        return CheckedCopy(*(_with_own_list(side) for side in (self.source, self.target)))


def check(copy: RowCopy) -> CheckedCopy:
    source = _side("source", copy.source, copy.source_rows)
    target = _side("target", copy.target, copy.target_rows)
    if source.row_bytes != target.row_bytes:
        raise BadInput(f"source rows have {source.row_bytes} bytes, target {target.row_bytes}")
    if source.count != target.count:
        raise BadInput(f"{source.count} source rows cannot fill {target.count} target rows")
    if isinstance(copy.target, np.ndarray) and not copy.target.flags.writeable:
        raise BadInput("target is read-only")
    return CheckedCopy(source, target)


def _with_own_list(side: Side) -> Side:
    return side if side.rows is None else replace(side, rows=side.rows.copy())


def _side(name: str, matrix: RowMatrix, rows: IndexList) -> Side:
    if isinstance(matrix, np.ndarray):
        shape, strides, item = matrix.shape, matrix.strides, matrix.itemsize
    else:
        _require_cpu_tensor(name, matrix)
        item = matrix.element_size()
        shape, strides = tuple(matrix.shape), tuple(step * item for step in matrix.stride())
    if len(shape) != 2:
        raise BadInput(f"{name} has {len(shape)} dimensions, must be rows x elements")
    row_bytes = shape[1] * item
    stride_bytes = strides[0] if shape[0] > 1 else row_bytes
    if row_bytes == 0 or row_bytes % 4:
        raise BadInput(f"{name} has rows of {row_bytes} bytes, must be a positive multiple of 4")
    if shape[1] > 1 and strides[1] != item:
        raise BadInput(f"{name} steps {strides[1]} bytes within a row, must be dense ({item})")
    if stride_bytes < row_bytes:
        raise BadInput(f"{name} steps {stride_bytes} bytes from row to row of {row_bytes} bytes")
    start = address(matrix) if isinstance(matrix, np.ndarray) else matrix.data_ptr()
    return Side(name, matrix, start, shape[0], row_bytes, stride_bytes, _list(name, rows))


def _list(name: str, rows: IndexList) -> npt.NDArray[Any] | None:
    if rows is None:
        return None
    if not isinstance(rows, np.ndarray):
        _require_cpu_tensor(f"{name}_rows", rows)
    if str(rows.dtype).removeprefix("torch.") not in _INDEX_DTYPES:
        raise BadInput(f"{name}_rows is {rows.dtype}, must be int32 or int64")
    plain: npt.NDArray[Any] = rows if isinstance(rows, np.ndarray) else rows.numpy()
    if plain.ndim != 1 or not plain.flags.c_contiguous:
        raise BadInput(f"{name}_rows of shape {plain.shape} is not a contiguous list")
    return plain


def _require_cpu_tensor(name: str, value: Tensor) -> None:
    if not hasattr(value, "data_ptr"):
        raise BadInput(f"{name} is {type(value).__name__}, must be a NumPy array or a torch tensor")
    if value.device.type != "cpu":
        no_device(str(value.device))


def no_device(device: str) -> NoReturn:
    raise Unavailable(f"rows on {device} cannot be moved: only the CPU backend is built so far")
