"""A checked copy as the native side reads it, and the native side's errors."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Final

from ess.errors import BadInput
from ess.flashtrans.views import CheckedCopy, Side
from ess.kernels.cpu import native

# Takes the way that was settled on for such copies, not one chosen by number.
SETTLED: Final = -1


class _NativeSide(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("row_count", ctypes.c_int64),
        ("list", ctypes.c_void_p),
        ("index_bytes", ctypes.c_int64),
    )


class NativeCopy(ctypes.Structure):
    """RowCopy of csrc/cpu/moves/rows.h."""

    _fields_ = (
        ("source", _NativeSide),
        ("target", _NativeSide),
        ("count", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class NativeFault(ctypes.Structure):
    """Fault of csrc/cpu/moves/rows.h."""

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
    """The bytes of a NativeCopy. The native call checks the row numbers and trusts all else."""
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
def copier() -> Callable[..., int]:
    """The function ess_rows_copy of csrc/cpu/moves/rows.cpp."""
    numbers = [ctypes.c_int32, ctypes.c_int64, ctypes.c_int32]
    arguments = [ctypes.c_void_p, *numbers, ctypes.c_void_p]
    return native.function("ess_rows_copy", arguments, ctypes.c_int32)
