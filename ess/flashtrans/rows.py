"""Copies of many small rows in one call. Native where it is built, NumPy otherwise: same results.

A call checks everything first: when it raises, nothing has been copied. The GIL is released.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ess.errors import BadInput
from ess.flashtrans.views import CheckedCopy, Side, check
from ess.kernels.cpu import native
from ess.kernels.streams import IndexList, RowCopy, RowMatrix

# Half of a 32 MiB last-level cache: from here on stores past the caches win (docs/log.md).
STREAM_ABOVE_BYTES: Final = 16 << 20


def gather_rows(
    *, source: RowMatrix, source_rows: IndexList, target: RowMatrix, threads: int = 1
) -> None:
    """Row source_rows[i] of `source` goes to row i of `target`."""
    copy_rows(source=source, source_rows=source_rows, target=target, threads=threads)


def scatter_rows(
    *, source: RowMatrix, target: RowMatrix, target_rows: IndexList, threads: int = 1
) -> None:
    """Row i of `source` goes to row target_rows[i] of `target`."""
    copy_rows(source=source, target=target, target_rows=target_rows, threads=threads)


def copy_rows(
    *,
    source: RowMatrix,
    source_rows: IndexList = None,
    target: RowMatrix,
    target_rows: IndexList = None,
    threads: int = 1,
) -> None:
    """See RowCopy for what matrices and lists may be. `threads` share the rows of large copies."""
    check_threads(threads)
    copy = RowCopy(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
    run(check(copy), threads=threads)


def check_threads(threads: int) -> None:
    if not 1 <= threads <= 1024:
        raise BadInput(f"threads is {threads}, must be 1..1024")


def run(copy: CheckedCopy, *, threads: int = 1, stream_above: int = STREAM_ABOVE_BYTES) -> None:
    if not native.available():
        check_row_numbers(copy)
        run_numpy(copy)
        return
    fault = NativeFault()
    packed = pack(copy)
    if _native_copy()(ctypes.byref(packed), threads, stream_above, ctypes.byref(fault)):
        raise fault.error([copy])


def run_numpy(copy: CheckedCopy) -> None:
    """Copies with NumPy; the row numbers have been checked."""
    source_rows, target_rows = copy.source.row_numbers(), copy.target.row_numbers()
    assert len(source_rows) == len(target_rows), "the two lists differ in length"
    kept = (source_rows >= 0) & (target_rows >= 0)
    copy.target.as_bytes()[target_rows[kept]] = copy.source.as_bytes()[source_rows[kept]]


def check_row_numbers(copy: CheckedCopy) -> None:
    for side in (copy.source, copy.target):
        rows = side.row_numbers()
        wrong = np.flatnonzero((rows < -1) | (rows >= side.row_count))
        if wrong.size:
            raise side.fault(int(wrong[0]), int(rows[wrong[0]]))


class _NativeSide(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("row_count", ctypes.c_int64),
        ("list", ctypes.c_void_p),
        ("index_bytes", ctypes.c_int64),
    )


class NativeCopy(ctypes.Structure):
    """RowCopy of csrc/cpu/rows.h."""

    _fields_ = (
        ("source", _NativeSide),
        ("target", _NativeSide),
        ("count", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class NativeFault(ctypes.Structure):
    """Fault of csrc/cpu/rows.h."""

    _fields_ = (
        ("copy", ctypes.c_int64),
        ("side", ctypes.c_int64),
        ("place", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )

    def error(self, copies: Sequence[CheckedCopy]) -> BadInput:
        assert 0 <= self.copy < len(copies), f"a fault in copy {self.copy} of {len(copies)}"
        assert self.side in (0, 1), f"a fault on side {self.side}"
        copy = copies[self.copy]
        side: Side = copy.target if self.side else copy.source
        return side.fault(int(self.place), int(self.row))


def pack(copy: CheckedCopy) -> NativeCopy:
    return NativeCopy.from_buffer_copy(packed(copy))


def packed(copy: CheckedCopy) -> bytes:
    """The bytes of a NativeCopy. The native call trusts all of them but the row numbers."""
    source, target = copy.source, copy.target
    count = source.count
    assert count == target.count, "the two lists differ in length"
    assert not source.on_device, "source rows on a device"
    assert not target.on_device, "target rows on a device"
    assert source.row_bytes == target.row_bytes, f"{source.row_bytes} bytes, {target.row_bytes}"
    assert source.device_rows is None, "the source's list is on a device"
    assert target.device_rows is None, "the target's list is on a device"
    return struct.pack("12q", *_numbers(source), *_numbers(target), count, source.row_bytes)


def _numbers(side: Side) -> tuple[int, ...]:
    matrix = (side.address, side.stride_bytes, side.row_count)
    assert side.stride_bytes >= side.row_bytes, f"rows of {side.name} overlap"
    if side.rows is None:
        return (*matrix, 0, 0)
    assert side.rows.flags.c_contiguous, f"{side.name}_rows is not contiguous"
    return (*matrix, native.address(side.rows), side.rows.itemsize)


@functools.cache
def _native_copy() -> Callable[..., int]:
    arguments = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p]
    return native.function("ess_rows_copy", arguments, ctypes.c_int32)
