"""Every program that serving may load: all can be built ahead, and all are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ess.kernels.cuda.program import Program
from ess.kernels.cuda.rows import MoveForm, flat_form, ring_form
from ess.pool.lru.cuda_shape import (
    PHASE_THREADS,
    resolve_program,
    slot_program,
)

ROW_BYTES: Final = (264, 528, 584, 656, 1152, 2304)


def programs() -> Iterator[Program]:
    for row_bytes in ROW_BYTES:
        yield flat_form(row_bytes).program
        if row_bytes % 16 == 0:
            yield ring_form(row_bytes).program
    yield resolve_program(is_together=False, threads=PHASE_THREADS)
    yield resolve_program(is_together=True, threads=PHASE_THREADS)
    for file in ("each.cu", "locate.cu", "upkeep.cu", "seal.cu", "audit.cu"):
        yield slot_program(file, PHASE_THREADS)


def rival_form(row_bytes: int, unit_bytes: int = 16) -> MoveForm:
    """The form of the copy kernel that the benchmark compares with."""
    return MoveForm(
        way="rival", row_bytes=row_bytes, unit_bytes=unit_bytes, in_flight=1, threads=1024
    )
