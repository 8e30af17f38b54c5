"""Every program that serving may load: all can be built ahead, and all are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ess.kernels.cuda.program import HOPPER, Program
from ess.kernels.cuda.rows import MoveForm, flat_form, ring_form
from ess.layout import IndexCodec
from ess.pool.lru.cuda_shape import PHASE_THREADS, resolve_program, slot_program
from ess.units import PAGE_ROWS

OF_HOPPER: Final = ("ring.cu", "together.cu")
"""The programs of bulk copies and of clusters; without them devices take rows.cu and resolve.cu."""
ROW_BYTES: Final = (264, 528, 584, 656, 1152, 2304)
KEYS: Final = (IndexCodec(form="fp8"), IndexCodec(form="f32"))


def programs(capability: tuple[int, int] = HOPPER) -> Iterator[Program]:
    """Those of a device of this compute capability; by default all."""
    is_hopper = capability >= HOPPER
    return (each for each in _all() if is_hopper or each.file not in OF_HOPPER)


def _all() -> Iterator[Program]:
    for row_bytes in moved_bytes():
        yield flat_form(row_bytes).program
    for row_bytes in ROW_BYTES:
        if row_bytes % 16 == 0:
            yield ring_form(row_bytes).program
    for file in ("resolve.cu", "together.cu", "each.cu"):
        for is_scored in (False, True):
            yield resolve_program(file, threads=PHASE_THREADS, is_scored=is_scored)
    for file in ("locate.cu", "upkeep.cu", "seal.cu", "audit.cu", "scores.cu"):
        yield slot_program(file, PHASE_THREADS)


def moved_bytes() -> list[int]:
    """The sizes of all that is moved as a row: rows and pages of rows; values and scales of index
    keys, both side by side, and pages of keys."""
    sizes = {each for row_bytes in ROW_BYTES for each in (row_bytes, PAGE_ROWS * row_bytes)}
    for keys in KEYS:
        sizes |= {keys.value_bytes, keys.scale_bytes, keys.key_bytes, keys.page_bytes}
    return sorted(sizes - {0})


def rival_form(row_bytes: int, unit_bytes: int = 16) -> MoveForm:
    """The form of the copy kernel that the benchmark compares with."""
    return MoveForm(
        way="rival", row_bytes=row_bytes, unit_bytes=unit_bytes, in_flight=1, threads=1024
    )
