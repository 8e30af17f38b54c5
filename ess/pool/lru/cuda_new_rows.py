"""Slots for the rows that a step writes, in all layer groups at once and without the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import Device, call
from ess.pool.lru.cuda_records import EachRecord, ResolveRecord, claim_record
from ess.pool.lru.cuda_shape import REPORT, ResolveShape, resolve_program
from ess.pool.lru.cuda_workspaces import MakeInts

EACH: Final = "each.cu"


class NewRows:
    """`claim_each` on a device. `rows`, int32 [1, n], are distinct but for pads of -1 and lie in
    the same memory in every step; `now` is the step's.

    The ledger has reserved room for them: should a group have none, its report counts rows in
    place. The records of the calls are written once, so that a claim can be captured; the arrays
    they name must outlive this object.
    """

    def __init__(
        self,
        device: Device,
        arenas: Sequence[Any],
        rows: Any,
        now: Any,
        *,
        ints: MakeInts,
        block_max: int,
    ) -> None:
        """`block_max` is the most blocks that any group may ever own."""
        self.shape = ResolveShape.of_new_rows(rows.shape[1], block_max)
        self.group_count = len(arenas)
        self._device = device
        sizes = new_row_sizes(self.shape, len(arenas))
        self._arrays = {name: ints(count) for name, count in sizes.items()}
        is_scored = arenas[0].rank_of is not None
        program = resolve_program(EACH, threads=self.shape.threads, is_scored=is_scored)
        self._kernels = {
            entry: device.kernel(program, entry) for entry, _ in self.shape.launches_each
        }
        self._calls = DeviceArray(device, np.ones(call_words(len(arenas)), np.int32))
        records = (ResolveRecord * len(arenas))(
            *(self._record(group, arena, rows, now) for group, arena in enumerate(arenas))
        )
        words = np.frombuffer(bytes(records), np.int32)
        self._calls.write(np.append(words, np.int32(1)))

    @property
    def slots(self) -> Any:
        """int32 [group, n], flat: the slot of each row, -1 where there is none."""
        return self._arrays["slots"]

    @property
    def reports(self) -> Any:
        """int32 [group, number of the report], flat: reports of each group's latest claim."""
        return self._arrays["report"]

    def claim(self, groups: range, *, stream: int) -> None:
        """Claims dirty slots in these neighbouring groups."""
        assert 0 <= groups.start < groups.stop <= self.group_count, f"groups {groups}"
        self._device.make_current()
        reports = self.reports[groups.start * len(REPORT) : groups.stop * len(REPORT)]
        call("cuMemsetD32Async", reports.data_ptr(), 0, reports.shape[0], stream)
        calls = self._calls.data_ptr() + groups.start * ctypes.sizeof(ResolveRecord)
        for entry, blocks in self.shape.launches_each:
            self._kernels[entry].launch(
                EachRecord(calls, blocks),
                blocks=blocks * len(groups),
                threads=self.shape.threads,
                stream=stream,
            )

    def _record(self, group: int, arena: Any, rows: Any, now: Any) -> ResolveRecord:
        workspace = {
            name: self._slice(group, name)
            for name in ("report", *self.shape.scratch, *self.shape.claims)
        }
        slots, query_count = self._slice(group, "slots"), self._calls[-1:]
        return claim_record(
            self.shape,
            arena=arena,
            workspace=workspace | {"now": now},
            rows=rows,
            slots=slots.data_ptr(),
            query_count=query_count.data_ptr(),
        )

    def _slice(self, group: int, name: str) -> Any:
        array = self._arrays[name]
        count = array.shape[0] // self.group_count
        return array[group * count : (group + 1) * count]


def call_words(group_count: int) -> int:
    """int32 numbers of the groups' records, plus one: the query count, always 1."""
    return group_count * ctypes.sizeof(ResolveRecord) // ctypes.sizeof(ctypes.c_int32) + 1


def new_row_sizes(shape: ResolveShape, group_count: int) -> dict[str, int]:
    """How many int32 numbers each array of NewRows takes, by name."""
    each = {"slots": shape.top_k, "report": len(REPORT)} | shape.scratch | shape.claims
    return {name: group_count * count for name, count in each.items()}
