"""Every program that this version may load, so that all can be built ahead and all are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ess.kernels.cuda.program import Program
from ess.kernels.cuda.rows import Hint, MoveForm, flat_form, ring_form
from ess.pool.lru.cuda_records import (
    CLUSTER_BLOCKS,
    CLUSTER_BLOCKS_MAX,
    PHASE_THREADS,
    TOGETHER_THREADS,
    resolve_program,
    slot_program,
)

ROW_BYTES: Final = (264, 528, 584, 656, 1152, 2304)
STORE_HINTS: Final[tuple[Hint, ...]] = ("streaming", "near", "plain")


def programs() -> Iterator[Program]:
    """What serving loads."""
    for row_bytes in ROW_BYTES:
        yield flat_form(row_bytes).program
        if row_bytes % 16 == 0:
            yield ring_form(row_bytes).program
    yield resolve_program(together=0, threads=PHASE_THREADS)
    for blocks in (1, CLUSTER_BLOCKS):
        yield resolve_program(together=blocks, threads=TOGETHER_THREADS)
    for file in ("locate.cu", "upkeep.cu", "audit.cu"):
        yield slot_program(file, PHASE_THREADS)


def trial_programs() -> Iterator[Program]:
    """What only the benchmark and the tests load: other hints and depths, a rival, a cluster."""
    for stores in STORE_HINTS:
        for in_flight in (1, 2, 4):
            for waits in (False, True):
                yield MoveForm(
                    way="flat",
                    row_bytes=656,
                    unit_bytes=16,
                    in_flight=in_flight,
                    threads=1024,
                    stores=stores,
                    waits_for_host=waits,
                ).program
    yield rival_form(656).program
    yield resolve_program(together=CLUSTER_BLOCKS_MAX, threads=TOGETHER_THREADS)


def rival_form(row_bytes: int) -> MoveForm:
    return MoveForm(way="rival", row_bytes=row_bytes, unit_bytes=16, in_flight=1, threads=1024)
