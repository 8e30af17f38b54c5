"""One layer group's residency on a device: plans, claims and landings without the host.

The arrays are torch tensors of the device with the names of ess/pool/arena.py; they belong to the
caller. A call queues kernels on a stream and returns. What changes from step to step is written to
`now`, so that a graph which holds a call can be replayed: write `now`, replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ess.errors import BadInput, Unavailable
from ess.kernels.cuda.driver import Device, call
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.lru.cuda_audit import KINDS, NONE_FOUND, assert_sound
from ess.pool.lru.cuda_records import (
    NOW,
    PHASE_THREADS,
    REPORT,
    AuditRecord,
    LocateRecord,
    Purpose,
    ResolveRecord,
    ResolveShape,
    UpkeepRecord,
    address,
    audit_record,
    locate_record,
    resolve_record,
    slot_program,
    upkeep_record,
    warm_record,
)
from ess.units import div_ceil

UPKEEP_BLOCKS_MAX: Final = 32
CLUSTERS_SINCE: Final = (9, 0)

OTHERS: Final = {
    "ess_locate": "locate.cu",
    "ess_land": "upkeep.cu",
    "ess_settle": "upkeep.cu",
    "ess_drop": "upkeep.cu",
    "ess_clear_blocks": "upkeep.cu",
    "ess_audit": "audit.cu",
}

MakeInts = Callable[[int], Any]


class Residency:
    """`ints(count)` makes int32 tensors on the device; they live as long as this object.

    All kernels are loaded here, so that a call can be captured. The lists that a call claims are of
    the workspace and hold until the next: what is copied behind other plans, as the rows of a
    landing request are, has a residency of its own over the same arena.
    """

    def __init__(self, device: Device, shape: ResolveShape, arena: Any, ints: MakeInts) -> None:
        if arena.row_of.shape[0] % 64:
            raise BadInput(f"a slab of {arena.row_of.shape[0]} slots is not whole blocks of 64")
        if shape.together > 1 and device.capability < CLUSTERS_SINCE:
            raise Unavailable(f"{device.name} has no clusters of {shape.together} blocks")
        self.shape = shape
        self.arena = arena
        self.workspace: Mapping[str, Any] = {
            name: ints(count) for name, count in shape.workspace.items()
        }
        self._findings = ints(2 + 2 * KINDS)
        self._device = device
        self._phases = [
            (device.kernel(shape.program, entry, cluster_blocks=shape.together), blocks)
            for entry, blocks in shape.launches
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
        assert REPORT[0] == "claimed", "the first number of a report says how many were claimed"
        return self.workspace["report"][:1]

    def plan(
        self,
        split: Any,
        rows: Any,
        *,
        stream: int,
        purpose: Purpose = "select",
        **options: Any,
    ) -> None:
        """Row ids [query, column]; with positions, page_table and table_row the room for them."""
        if rows.shape != (self.shape.query_max, self.shape.top_k):
            wanted = (self.shape.query_max, self.shape.top_k)
            raise BadInput(f"rows have shape {tuple(rows.shape)}, must be {wanted}")
        given = {"arena": self.arena, "split": split, "workspace": self.workspace, "rows": rows}
        self._resolve(resolve_record(self.shape, **given, purpose=purpose, **options), stream)

    def claim_new(self, split: Any, rows: Any, *, stream: int) -> None:
        """Dirty slots for distinct rows that the step is about to write; pads are left out.

        The ledger has reserved room for them: should there be none, the report counts places.
        """
        self.plan(split, rows, stream=stream, purpose="write")

    def warm(self, rows: Any, ages: Any, *, stream: int, **options: Any) -> None:
        """Distinct rows as if they had been selected `ages` steps ago, newest first.

        At most as many as the shape has entries; `count` on the device says how many. What they
        claim is with the workspace and the report, as of a plan; there is no split.
        """
        given = {"arena": self.arena, "workspace": self.workspace, "rows": rows}
        self._resolve(warm_record(self.shape, **given, ages=ages, **options), stream)

    def fill(self, rows: Any, *, stream: int, **options: Any) -> None:
        """Absent rows take free slots while there are any, and rank as the oldest of the used."""
        self.warm(rows, None, stream=stream, **options)

    def locate(self, slots: Any, rows: Any, *, stream: int, **selection: Any) -> None:
        """RESIDENT: slots of rows that have all landed. Faults add up in the report."""
        given = {"arena": self.arena, "rows": rows, "slots": slots, "workspace": self.workspace}
        record = locate_record(**given, **selection)
        self._launch("ess_locate", record, rows.shape[0], stream)

    def land(self, slots: Any, *, stream: int, count: Any = None) -> None:
        """The slots of the plan that `now` still names have arrived."""
        self._upkeep("ess_land", slots, count, stream)

    def settle(self, slots: Any, *, stream: int, count: Any = None) -> None:
        self._upkeep("ess_settle", slots, count, stream)

    def drop(self, rows: Any, *, stream: int, count: Any = None) -> None:
        """How many left adds up in the report until the next plan."""
        self._upkeep("ess_drop", rows, count, stream)

    def clear_blocks(self, blocks: Any, *, stream: int) -> None:
        """All rows of these blocks leave, or none: the report has how many slots are `held`."""
        record = upkeep_record(self.arena, blocks, workspace=self.workspace)
        self._launch("ess_clear_blocks", record, 1, stream)

    def check(self, *, stream: int) -> None:
        """Audits the whole group, as of `now`; an AssertionError says what is wrong and where."""
        record = audit_record(self.arena, self._findings, workspace=self.workspace)
        self._device.make_current()
        call("cuMemsetD32Async", record.used, 0, 2 + KINDS, stream)
        call("cuMemsetD32Async", record.first, NONE_FOUND, KINDS, stream)
        self._launch("ess_audit", record, UPKEEP_BLOCKS_MAX, stream)
        CudaEvent(self._device).record(stream).wait()
        assert_sound(self._findings.tolist())

    def report(self) -> dict[str, int]:
        """Waits for the device; for tests, audits and counters that may come late."""
        numbers = self.workspace["report"].tolist()
        assert min(numbers) >= 0, f"a count below zero: {numbers}"
        return dict(zip(REPORT, map(int, numbers), strict=True))

    def _resolve(self, record: ResolveRecord, stream: int) -> None:
        self._device.make_current()
        if not self.shape.together:
            report = address(self.workspace["report"])
            call("cuMemsetD32Async", report, 0, len(REPORT), stream)
        for kernel, blocks in self._phases:
            assert blocks > 0, "a phase without blocks would not run"
            kernel.launch(record, blocks=blocks, threads=self.shape.threads, stream=stream)

    def _upkeep(self, entry: str, numbers: Any, count: Any, stream: int) -> None:
        record = upkeep_record(self.arena, numbers, count=count, workspace=self.workspace)
        blocks = min(UPKEEP_BLOCKS_MAX, max(1, div_ceil(record.count_max, PHASE_THREADS)))
        self._launch(entry, record, blocks, stream)

    def _launch(
        self,
        entry: str,
        record: LocateRecord | UpkeepRecord | AuditRecord,
        blocks: int,
        stream: int,
    ) -> None:
        assert blocks > 0, f"{entry} without blocks would not run"
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
