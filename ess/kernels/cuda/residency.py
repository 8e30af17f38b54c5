"""One layer group's residency on a device: plans, claims and landings without the host.

The arrays are torch tensors of the device with the names of ess/pool/arena.py; they belong to the
caller. A call queues kernels on a stream and returns. What changes from step to step is written to
`now`, so that a graph which holds a call can be replayed: write `now`, replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ess.errors import BadInput
from ess.kernels.cuda.driver import Device, call
from ess.kernels.cuda.resolve import (
    NOW,
    PHASE_THREADS,
    REPORT,
    LocateRecord,
    ResolveShape,
    UpkeepRecord,
    address,
    locate_record,
    resolve_record,
    slot_program,
    upkeep_record,
)
from ess.units import div_ceil

UPKEEP_BLOCKS_MAX: Final = 32

OTHERS: Final = {
    "ess_locate": "locate.cu",
    "ess_land": "upkeep.cu",
    "ess_settle": "upkeep.cu",
    "ess_drop": "upkeep.cu",
}

MakeInts = Callable[[int], Any]


class Residency:
    """`ints(count)` makes int32 tensors on the device; they live as long as this object.

    All kernels are loaded here, so that a call can be captured.
    """

    def __init__(self, device: Device, shape: ResolveShape, arena: Any, ints: MakeInts) -> None:
        if arena.row_of.shape[0] % 64:
            raise BadInput(f"a slab of {arena.row_of.shape[0]} slots is not whole blocks of 64")
        self.shape = shape
        self.arena = arena
        self.workspace: Mapping[str, Any] = {
            name: ints(count) for name, count in shape.workspace.items()
        }
        self._device = device
        self._phases = [
            (device.kernel(shape.program, entry), blocks) for entry, blocks in shape.launches
        ]
        self._others = {
            entry: device.kernel(slot_program(file, PHASE_THREADS), entry)
            for entry, file in OTHERS.items()
        }

    @property
    def now(self) -> Any:
        """int32 [5] on the device: step, ticket, query_count, block_count, stamps."""
        return self.workspace["now"]

    @property
    def claimed_count(self) -> Any:
        """int32 [1] on the device: how many of the claimed slots and rows are of the last plan."""
        return self.workspace["report"][:1]

    def plan(self, split: Any, rows: Any, *, stream: int, **selection: Any) -> None:
        """Row ids [query, column]; with positions, page_table and table_row the room for them."""
        if rows.shape != (self.shape.query_max, self.shape.top_k):
            wanted = (self.shape.query_max, self.shape.top_k)
            raise BadInput(f"rows have shape {tuple(rows.shape)}, must be {wanted}")
        given = {"arena": self.arena, "split": split, "workspace": self.workspace, "rows": rows}
        record = resolve_record(self.shape, **given, **selection)
        self._device.make_current()
        if not self.shape.alone:
            report = address(self.workspace["report"])
            call("cuMemsetD32Async", report, 0, len(REPORT), stream)
        for kernel, blocks in self._phases:
            kernel.launch(record, blocks=blocks, threads=self.shape.threads, stream=stream)

    def claim_new(self, split: Any, rows: Any, *, stream: int) -> None:
        """Dirty slots for distinct rows that the step is about to write; pads are left out.

        The ledger has reserved room for them: should there be none, the report counts places.
        """
        self.plan(split, rows, stream=stream, writes=True)

    def locate(self, slots: Any, rows: Any, *, stream: int, **selection: Any) -> None:
        """RESIDENT: slots of rows that have all landed. Faults add up in the report."""
        given = {"arena": self.arena, "rows": rows, "slots": slots, "workspace": self.workspace}
        record = locate_record(**given, **selection)
        self._launch("ess_locate", record, rows.shape[0], stream)

    def land(self, slots: Any, *, stream: int, count: Any = None) -> None:
        """The slots of the plan that `now` still names have arrived."""
        record = upkeep_record(self.arena, slots, count=count, ticket=self.now[1:])
        self._upkeep("ess_land", record, stream)

    def settle(self, slots: Any, *, stream: int, count: Any = None) -> None:
        self._upkeep("ess_settle", upkeep_record(self.arena, slots, count=count), stream)

    def drop(self, rows: Any, *, stream: int, count: Any = None) -> None:
        self._upkeep("ess_drop", upkeep_record(self.arena, rows, count=count), stream)

    def report(self) -> dict[str, int]:
        """Waits for the device; for tests, audits and counters that may come late."""
        numbers = self.workspace["report"].tolist()
        return dict(zip(REPORT, map(int, numbers), strict=True))

    def _upkeep(self, entry: str, record: UpkeepRecord, stream: int) -> None:
        blocks = min(UPKEEP_BLOCKS_MAX, max(1, div_ceil(record.count_max, PHASE_THREADS)))
        self._launch(entry, record, blocks, stream)

    def _launch(
        self, entry: str, record: LocateRecord | UpkeepRecord, blocks: int, stream: int
    ) -> None:
        self._others[entry].launch(record, blocks=blocks, threads=PHASE_THREADS, stream=stream)


def now_of(
    *, step: int, ticket: int, query_count: int, block_count: int, stamps: bool = True
) -> list[int]:
    """The numbers of `now`, in their order."""
    numbers = [step, ticket, query_count, block_count, int(stamps)]
    assert len(numbers) == len(NOW), "one number for each name"
    assert step > 0, f"step {step}"
    assert ticket > 0, f"ticket {ticket}"
    return numbers
