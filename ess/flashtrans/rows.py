"""Copies of many small rows in one call: native where built, else NumPy, with equal results.

Each call checks everything first: if it raises, nothing was copied. The GIL is released.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from ess.errors import BadInput
from ess.flashtrans.native_rows import SETTLED, NativeFault, copier, pack
from ess.flashtrans.views import CheckedCopy, check
from ess.flashtrans.ways import settle
from ess.kernels.cpu import native
from ess.kernels.streams import IndexList, RowCopy, RowMatrix

# Half of a 32 MiB last-level cache: from here on stores past the caches win (docs/log.md).
STREAM_ABOVE_BYTES: Final = 16 << 20


def gather_rows(
    *, source: RowMatrix, source_rows: IndexList, target: RowMatrix, threads: int = 1
) -> None:
    """Copies row source_rows[i] of `source` to row i of `target`."""
    copy_rows(source=source, source_rows=source_rows, target=target, threads=threads)


def scatter_rows(
    *, source: RowMatrix, target: RowMatrix, target_rows: IndexList, threads: int = 1
) -> None:
    """Copies row i of `source` to row target_rows[i] of `target`."""
    copy_rows(source=source, target=target, target_rows=target_rows, threads=threads)


def copy_rows(
    *,
    source: RowMatrix,
    source_rows: IndexList = None,
    target: RowMatrix,
    target_rows: IndexList = None,
    threads: int = 1,
) -> None:
    """Copies as RowCopy describes. `threads` threads share the rows of a large copy."""
    check_threads(threads)
    copy = RowCopy(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
    run(check(copy), threads=threads)


def check_threads(threads: int) -> None:
    if not 1 <= threads <= 1024:
        raise BadInput(f"threads is {threads}, must be 1..1024")


def run(
    copy: CheckedCopy,
    *,
    threads: int = 1,
    stream_above: int = STREAM_ABOVE_BYTES,
    way: int = SETTLED,
) -> None:
    """Copies in the way settled on for such copies, or in another of ess.flashtrans.ways."""
    if not native.available():
        check_row_numbers(copy)
        run_numpy(copy)
        return
    settle()
    fault = NativeFault()
    packed = pack(copy)
    if copier()(ctypes.byref(packed), threads, stream_above, way, ctypes.byref(fault)):
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
