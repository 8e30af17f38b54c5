"""Checks the row matrices and index lists of any library once, and turns them into addresses.

A torch tensor is recognised by its `data_ptr`, so torch need not be installed. Row numbers are
checked later in the call, by the code that copies; numbers in device lists are never checked.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, Unavailable
from ess.kernels.cpu.native import address
from ess.kernels.streams import IndexList, KnownMatrix, RowCopy, RowMatrix, Tensor

_INDEX_DTYPES: Final = (np.dtype(np.int32), np.dtype(np.int64))


@dataclass(frozen=True, slots=True)
class DeviceList:
    """int32 numbers on a device, kept alive by their tensor."""

    owner: object
    address: int
    count: int


@dataclass(slots=True)
class Side:
    """A matrix and its list. `owner` keeps the memory alive as long as this object lives."""

    name: str
    owner: object
    address: int
    row_count: int
    row_bytes: int
    stride_bytes: int
    rows: npt.NDArray[Any] | None
    on_device: bool = False
    device_rows: DeviceList | None = None

    @property
    def count(self) -> int:
        if self.device_rows is not None:
            return self.device_rows.count
        return self.row_count if self.rows is None else len(self.rows)

    def row_numbers(self) -> npt.NDArray[Any]:
        assert self.device_rows is None, "the host cannot read a list on a device"
        assert self.rows is None or self.rows.ndim == 1, f"{self.name}_rows is no list"
        return np.arange(self.row_count) if self.rows is None else self.rows

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """The matrix itself as writable bytes, row by row."""
        assert not self.on_device, "the host cannot read rows on a device"
        shape, strides = (self.row_count, self.row_bytes), (self.stride_bytes, 1)
        if self.row_count == 0:
            return np.empty(shape, np.uint8)
        span = (self.row_count - 1) * self.stride_bytes + self.row_bytes
        assert span >= self.row_count * self.row_bytes, f"rows of {self.name} overlap"
        memory = memoryview((ctypes.c_char * span).from_address(self.address))
        return np.ndarray(shape, np.uint8, memory, 0, strides)

    def fault(self, place: int, row: int) -> BadInput:
        assert not -1 <= row < self.row_count, f"row {row} of {self.row_count} is right"
        return BadInput(
            f"{self.name}_rows[{place}] is {row}, outside -1..{self.row_count - 1} of {self.name}"
        )


@dataclass(slots=True)
class CheckedCopy:
    """A copy that passed the checks; `device_count`, if any, holds how many pairs are copied."""

    source: Side
    target: Side
    device_count: DeviceList | None = None

    @property
    def count(self) -> int:
        return self.source.count


def check(copy: RowCopy, *, devices: bool = False) -> CheckedCopy:
    """Checks a copy; with `devices`, matrices and lists may be tensors on a device."""
    source = _side("source", copy.source, copy.source_rows, devices=devices)
    target = _side("target", copy.target, copy.target_rows, devices=devices)
    if source.row_bytes != target.row_bytes:
        raise BadInput(f"source rows have {source.row_bytes} bytes, target {target.row_bytes}")
    if source.count != target.count:
        raise BadInput(f"{source.count} source rows cannot fill {target.count} target rows")
    if isinstance(copy.target, np.ndarray) and not copy.target.flags.writeable:
        raise BadInput("target is read-only")
    if copy.count is None:
        return CheckedCopy(source, target)
    return CheckedCopy(source, target, _device_count(copy.count, source, target, devices=devices))


def known(matrix: npt.NDArray[Any]) -> KnownMatrix:
    """Checks a writable matrix once, for many copies from it or to it."""
    if not matrix.flags.writeable:
        raise BadInput("a known matrix is read-only")
    side = _side("matrix", matrix, None, devices=False)
    return KnownMatrix(matrix, side.address, side.row_count, side.row_bytes, side.stride_bytes)


def _side(name: str, matrix: RowMatrix, rows: IndexList, *, devices: bool) -> Side:
    if isinstance(matrix, KnownMatrix):
        shape = matrix.address, matrix.row_count, matrix.row_bytes, matrix.stride_bytes
        side = Side(name, matrix, *shape, None)
    else:
        side = _matrix(name, matrix, devices=devices)
    tensor = None if rows is None or isinstance(rows, np.ndarray) else rows
    if devices and tensor is not None and _is_on_device(f"{name}_rows", tensor, devices=True):
        side.device_rows = _device_list(name, tensor)
    else:
        side.rows = _list(name, rows)
    assert side.row_bytes % 4 == 0, f"{name} has rows of {side.row_bytes} bytes"
    return side


def _matrix(name: str, matrix: npt.NDArray[Any] | Tensor, *, devices: bool) -> Side:
    on_device = False
    if isinstance(matrix, np.ndarray):
        shape, strides, item = matrix.shape, matrix.strides, matrix.itemsize
    else:
        on_device = _is_on_device(name, matrix, devices=devices)
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
    return Side(name, matrix, start, shape[0], row_bytes, stride_bytes, None, on_device)


def _device_list(name: str, rows: Tensor) -> DeviceList:
    if str(rows.dtype) != "torch.int32":
        raise BadInput(f"{name}_rows is {rows.dtype}, must be int32 on a device")
    if len(rows.shape) != 1 or (rows.shape[0] > 1 and rows.stride()[0] != 1):
        raise BadInput(f"{name}_rows of shape {tuple(rows.shape)} is not a contiguous list")
    return DeviceList(rows, rows.data_ptr(), int(rows.shape[0]))


def _device_count(count: Tensor, *sides: Side, devices: bool) -> DeviceList:
    if not _is_on_device("count", count, devices=devices):
        raise BadInput("count is on the host: leave it out and shorten the lists")
    if str(count.dtype) != "torch.int32" or tuple(count.shape) not in ((), (1,)):
        raise BadInput(f"count is {count.dtype} of shape {tuple(count.shape)}, must be one int32")
    for side in sides:
        if side.rows is not None:
            raise BadInput(f"count is on a device, so {side.name}_rows must be there too")
    return DeviceList(count, count.data_ptr(), 1)


def _list(name: str, rows: IndexList) -> npt.NDArray[Any] | None:
    if rows is None:
        return None
    plain = rows if isinstance(rows, np.ndarray) else _numpy_list(name, rows)
    if plain.dtype not in _INDEX_DTYPES:
        raise BadInput(f"{name}_rows is {plain.dtype}, must be int32 or int64")
    if plain.ndim != 1 or not plain.flags.c_contiguous:
        raise BadInput(f"{name}_rows of shape {plain.shape} is not a contiguous list")
    return plain


def _numpy_list(name: str, rows: Tensor) -> npt.NDArray[Any]:
    """The same memory as an array; not every element type of torch exists in NumPy."""
    _is_on_device(f"{name}_rows", rows, devices=False)
    if str(rows.dtype) not in ("torch.int32", "torch.int64"):
        raise BadInput(f"{name}_rows is {rows.dtype}, must be int32 or int64")
    plain: npt.NDArray[Any] = rows.numpy()
    return plain


def _is_on_device(name: str, value: Tensor, *, devices: bool) -> bool:
    if not hasattr(value, "data_ptr"):
        raise BadInput(f"{name} is {type(value).__name__}, must be a NumPy array or a torch tensor")
    home = value.device.type
    if home != "cpu" and not (devices and home == "cuda"):
        no_device(str(value.device))
    return bool(home != "cpu")


def no_device(device: str) -> NoReturn:
    raise Unavailable(f"rows on {device} cannot be moved by a CPU lane: open_lane(device='cuda')")
