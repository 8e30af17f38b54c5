"""Which kernel moves rows, for which constants it is compiled, and the record it takes.

This module touches no device: a form is chosen from numbers, and a record is plain memory.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Final, Literal

from ess.errors import BadInput
from ess.kernels.cuda.program import Program
from ess.units import align_up, div_ceil

Way = Literal["flat", "ring", "rival"]

COPY_BLOCKS: Final = 4
"""Blocks of a multiprocessor each that fill the link; attention beside a copy leaves these free."""
UNITS: Final = (16, 8, 4)
PAIRS_MAX: Final = 1 << 30
FLAT_THREADS: Final = 1024
FLAT_IN_FLIGHT: Final = 4
RING_THREADS: Final = 64
RING_DEPTH_MAX: Final = 4
SHARED_BYTES_MAX: Final = 227 << 10
LINE_BYTES: Final = 128
KERNELS: Final[dict[Way, tuple[str, str]]] = {
    "flat": ("rows.cu", "ess_move_rows"),
    "ring": ("ring.cu", "ess_ring_rows"),
    "rival": ("rival.cu", "ess_rival_rows"),
}


class MoveRecord(ctypes.Structure):
    """Move of csrc/flashtrans/move.cuh."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("source_rows", ctypes.c_void_p),
        ("source_stride", ctypes.c_int64),
        ("target", ctypes.c_void_p),
        ("target_rows", ctypes.c_void_p),
        ("target_stride", ctypes.c_int64),
        ("count", ctypes.c_void_p),
        ("count_max", ctypes.c_int64),
        ("lines_of", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveForm:
    """A kernel with its constants and the shape of its blocks.

    `span_bytes` is the most that a row takes in whole lines of 128 bytes, wherever it begins.
    """

    way: Way
    row_bytes: int
    unit_bytes: int
    in_flight: int
    threads: int
    span_bytes: int = 0

    @property
    def program(self) -> Program:
        shape = {
            "flat": (("ESS_SPAN_BYTES", self.span_bytes), ("ESS_IN_FLIGHT", self.in_flight)),
            "ring": (("ESS_DEPTH", self.in_flight),),
            "rival": (),
        }[self.way]
        row = ("ESS_ROW_BYTES", self.row_bytes), ("ESS_UNIT_BYTES", self.unit_bytes)
        return Program(file=KERNELS[self.way][0], defines=(*row, *shape))

    @property
    def entry(self) -> str:
        return KERNELS[self.way][1]

    @property
    def shared_bytes(self) -> int:
        """The ring's rows and their arrival barriers."""
        places = self.threads * self.in_flight
        return places * (self.row_bytes + 8) if self.way == "ring" else 0

    @property
    def block_rows(self) -> int:
        """The number of rows that a block has on the wire at once."""
        if self.way != "flat":
            return self.threads if self.way == "ring" else self.threads // 32
        return max(1, self.threads * self.in_flight * self.unit_bytes // self.span_bytes)

    def blocks(self, pair_count: int, *, block_count_max: int) -> int:
        """How many blocks to launch: no more than there is work for."""
        return max(1, min(block_count_max, div_ceil(pair_count, self.block_rows)))


def flat_form(row_bytes: int, *numbers: int) -> MoveForm:
    """The widest units that rows, strides and addresses allow, and the least span."""
    step = math.gcd(LINE_BYTES, row_bytes, *numbers)
    return MoveForm(
        way="flat",
        row_bytes=row_bytes,
        unit_bytes=widest_unit(row_bytes, *numbers),
        in_flight=FLAT_IN_FLIGHT,
        threads=FLAT_THREADS,
        span_bytes=align_up(row_bytes + LINE_BYTES - step, LINE_BYTES),
    )


def ring_form(row_bytes: int, *numbers: int, shared_max: int = SHARED_BYTES_MAX) -> MoveForm:
    """Gives a thread as many rows as shared memory holds, and takes fewer threads where two do not
    fit."""
    if widest_unit(row_bytes, *numbers) != 16:
        raise BadInput(
            f"rows of {row_bytes} bytes, their strides and addresses must be multiples of 16"
        )
    threads = RING_THREADS
    while threads > 1 and shared_max // (threads * (row_bytes + 8)) < 2:
        threads //= 2
    depth = min(RING_DEPTH_MAX, shared_max // (threads * (row_bytes + 8)))
    if depth < 2:
        raise BadInput(f"two rows of {row_bytes} bytes do not fit into {shared_max} bytes")
    return MoveForm(
        way="ring", row_bytes=row_bytes, unit_bytes=16, in_flight=depth, threads=threads
    )


def widest_unit(*numbers: int) -> int:
    common = math.gcd(*numbers)
    for unit in UNITS:
        if common % unit == 0:
            return unit
    raise BadInput(f"rows, strides and addresses must be multiples of 4 bytes, not of {common}")


def move_record(
    *,
    source: int,
    source_stride: int,
    target: int,
    target_stride: int,
    pair_count: int,
    source_rows: int = 0,
    target_rows: int = 0,
    count: int = 0,
    lines_of_target: bool = False,
) -> MoveRecord:
    """Addresses as numbers; 0 is no list, no count. `lines_of_target`: the target is farther."""
    if not 0 <= pair_count <= PAIRS_MAX:
        raise BadInput(f"{pair_count} rows in one call, at most {PAIRS_MAX}")
    return MoveRecord(
        *(source, source_rows, source_stride),
        *(target, target_rows, target_stride),
        *(count, pair_count, int(lines_of_target)),
    )
