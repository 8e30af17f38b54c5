"""The residency of one layer group on a device: plans and claims without the host.

The arrays are torch tensors of the device with the names of ess/pool/lru/arena.py, and with them
`block_count`, int32 [1]; they belong to the caller. A call queues kernels on a stream and returns.
What changes from step to step is written to `now`, so that a graph which holds a call can be
replayed: write `now`, replay.

It differs from the specification in three things, all about work that the host would do:

* nothing is done when a copy lands: `now` and each call's `Moment` say what has landed;
* rows without a slot are named by host row at once, in `place` and in `slots` (-2 - host row);
* a row that a landing is still bringing counts as such a row, so that no step waits for a landing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ess.errors import BadInput
from ess.kernels.cuda.driver import Device, call
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.lru.cuda_audit import KINDS, NONE_FOUND, assert_sound
from ess.pool.lru.cuda_records import (
    AuditRecord,
    LocateRecord,
    ObserveRecord,
    ResolveRecord,
    UpkeepRecord,
    address,
    audit_record,
    locate_record,
    observe_record,
    resolve_record,
    upkeep_record,
    warm_record,
)
from ess.pool.lru.cuda_shape import FIRST, PHASE_THREADS, Launch, Moment, slot_program
from ess.pool.lru.cuda_workspaces import Claims, ResidencyWorkspaces
from ess.units import div_ceil

UPKEEP_BLOCKS_MAX: Final = 32

OTHERS: Final = {
    "ess_locate": "locate.cu",
    "ess_settle": "upkeep.cu",
    "ess_drop": "upkeep.cu",
    "ess_clear_blocks": "upkeep.cu",
    "ess_audit": "audit.cu",
}


SCORES: Final = {"ess_scale": "scores.cu", "ess_follow": "scores.cu"}


class Residency:
    """All kernels are loaded here, so that a call can be captured."""

    def __init__(
        self, device: Device, arena: Any, workspaces: ResidencyWorkspaces, *, group: int = 0
    ) -> None:
        if arena.row_of.shape[0] % 64:
            raise BadInput(f"a slab of {arena.row_of.shape[0]} slots is not whole blocks of 64")
        self.arena = arena
        self.shape = replace(
            workspaces.shape, is_together=workspaces.shape.is_together and device.has_clusters
        )
        self.workspaces = workspaces
        self.group = group
        self._device = device
        launches = self.shape.launches(self.shape.query_max)
        is_scored = arena.rank_of is not None
        program = self.shape.program(is_scored=is_scored)
        self._phases = {entry: device.kernel(program, entry) for entry, _ in launches}
        self._others = {
            entry: device.kernel(slot_program(file, PHASE_THREADS), entry)
            for entry, file in (OTHERS | (SCORES if is_scored else {})).items()
        }

    def plan(
        self,
        split: Any,
        rows: Any,
        *,
        stream: int,
        moment: Moment = FIRST,
        **options: Any,
    ) -> None:
        """Plans for row ids [query, column], or for positions, whose row ids `rows` then gets."""
        given = {"arena": self.arena, "split": split, "rows": rows, "moment": moment}
        given |= {"workspace": self._workspace(moment)}
        record = resolve_record(self.shape, **given, **options)
        self._resolve(record, self.shape.launches(rows.shape[0]), stream)

    def warm(
        self,
        rows: Any,
        ages: Any,
        *,
        stream: int,
        moment: Moment = FIRST,
        **options: Any,
    ) -> None:
        """Makes distinct rows resident as if they had been selected `ages` steps ago, newest first.

        There are at most as many as the shape has entries; `count` on the device says how many.
        Only claims and a report come of it, no split.
        """
        given = {"arena": self.arena, "rows": rows, "moment": moment}
        given |= {"workspace": self._workspace(moment), "ages": ages}
        record = warm_record(self.shape, **given, **options)
        self._resolve(record, self.shape.launches(self.shape.query_max), stream)

    def fill(self, rows: Any, *, stream: int, **options: Any) -> None:
        """Puts absent rows into free slots while there are any, as the oldest of the used rows."""
        self.warm(rows, None, stream=stream, **options)

    def observe(
        self, positions: Any, logits: Any, *, stream: int, moment: Moment, **given: Any
    ) -> None:
        """The ranks of all rows of these queries follow the logits. `given` is room for `scales`
        and `holders`, and the queries' `page_table`, `table_row` and `length`."""
        at = {"arena": self.arena, "workspace": self._workspace(moment), "moment": moment}
        record = observe_record(positions=positions, logits=logits, **at, **given)
        self._launch("ess_scale", record, record.query_max, stream)
        self._launch("ess_follow", record, record.query_max * record.blocks_each, stream)

    def claims(self, moment: Moment = FIRST) -> Claims:
        """The claims of the call at this moment, for the copy behind it."""
        return self.workspaces.claims(self.group, moment)

    def locate(
        self,
        slots: Any,
        rows: Any,
        *,
        stream: int,
        moment: Moment = FIRST,
        **selection: Any,
    ) -> None:
        """RESIDENT: slots of rows that have all landed. The report counts others as faults."""
        given = {"arena": self.arena, "rows": rows, "slots": slots, "moment": moment}
        record = locate_record(**given, workspace=self._workspace(moment), **selection)
        self._launch("ess_locate", record, rows.shape[0], stream)

    def settle(self, slots: Any, *, stream: int, count: Any = None) -> None:
        """The host has the rows of these slots; negative slots are passed over, as in `drop`."""
        self._upkeep("ess_settle", slots, count, stream)

    def drop(self, rows: Any, *, stream: int, count: Any = None) -> None:
        """These rows leave; the report adds up how many did."""
        self._upkeep("ess_drop", rows, count, stream)

    def clear_blocks(self, blocks: Any, *, stream: int) -> None:
        """All rows of these blocks leave, or none: the report says how many slots are `held`."""
        record = upkeep_record(self.arena, blocks, workspace=self._workspace())
        self._launch("ess_clear_blocks", record, 1, stream)

    def check(self, findings: Any, *, stream: int) -> None:
        """Audits the whole group, as of `now`; an AssertionError says what is wrong and where.

        `findings` is room for FINDINGS int32 numbers on the device.
        """
        record = audit_record(self.arena, findings, workspace=self._workspace())
        self._device.make_current()
        call("cuMemsetD32Async", record.used, 0, 2 + KINDS, stream)
        call("cuMemsetD32Async", record.first, NONE_FOUND, KINDS, stream)
        self._launch("ess_audit", record, UPKEEP_BLOCKS_MAX, stream)
        CudaEvent(self._device).record(stream).wait()
        assert_sound(findings.tolist())

    def report(self, *, part: int = 0) -> dict[str, int]:
        return self.workspaces.report(self.group, part)

    def _workspace(self, moment: Moment = FIRST) -> Mapping[str, Any]:
        return self.workspaces.of(self.group, moment)

    def _resolve(self, record: ResolveRecord, launches: Sequence[Launch], stream: int) -> None:
        for entry, blocks in launches:
            assert blocks > 0, "a phase without blocks would not run"
            kernel = self._phases[entry]
            kernel.launch(record, blocks=blocks, threads=self.shape.threads, stream=stream)

    def _upkeep(self, entry: str, numbers: Any, count: Any, stream: int) -> None:
        record = upkeep_record(self.arena, numbers, count=count, workspace=self._workspace())
        blocks = min(UPKEEP_BLOCKS_MAX, max(1, div_ceil(record.count_max, PHASE_THREADS)))
        self._launch(entry, record, blocks, stream)

    def _launch(
        self,
        entry: str,
        record: LocateRecord | ObserveRecord | UpkeepRecord | AuditRecord,
        blocks: int,
        stream: int,
    ) -> None:
        assert blocks > 0, f"{entry} without blocks would not run"
        self._others[entry].launch(record, blocks=blocks, threads=PHASE_THREADS, stream=stream)


def forget_tickets(device: Device, ticket_of: Any, *, stream: int) -> None:
    """All copies have landed; tickets start over. To be called before they come near 2^31."""
    device.make_current()
    call("cuMemsetD32Async", address(ticket_of), 0, ticket_of.shape[0], stream)
