"""The memory that residency calls work in: shared by all layer groups, since calls take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ess.errors import BadInput
from ess.kernels.cuda.driver import Device, call
from ess.pool.lru.cuda_shape import FIRST, NOW, REPORT, Moment, ResolveShape

MakeInts = Callable[[int], Any]


class Claims(NamedTuple):
    """Host rows to copy into slots: the first `count` (int32 [1], on the device) of both arrays.

    A negative host row means a page that is on no host; the report counts it as unwritten.
    """

    host_rows: Any
    slots: Any
    count: Any


class ResidencyWorkspaces:
    """`now`, and for each call its work memory, its claims and its report.

    Calls are queued on one stream, so all share `now` and the memory between phases. A copy reads
    the claims of a call while later calls run, so claims lie in a ring: call i of a step takes
    place i. `ring` consecutive calls do not overwrite one another; the next may be queued when its
    stream waits for the copy of the first. Two are enough where a group's halves are planned one
    after the other, three where two halves of a batch take turns.

    There is a report per group and part, so that one reading after the step has all counters. It
    holds for one step: `begin` clears all reports at the head of a step, when no copy of the step
    before is under way.
    """

    def __init__(
        self,
        device: Device,
        shape: ResolveShape,
        ints: MakeInts,
        *,
        group_count: int = 1,
        part_max: int = 1,
        ring: int = 2,
    ) -> None:
        """`ints(count)` makes int32 tensors on the device; they live as long as this object."""
        if min(group_count, part_max, ring) < 1:
            raise BadInput(f"{group_count} groups, {part_max} parts, a ring of {ring}")
        self.shape = shape
        self.group_count, self.part_max, self.ring = group_count, part_max, ring
        self._device = device
        sizes = workspace_sizes(shape, group_count=group_count, part_max=part_max, ring=ring)
        self._arrays = {name: ints(count) for name, count in sizes.items()}

    @property
    def now(self) -> Any:
        """int32 on the device, as `now_of` lists it; written before the first call of a step."""
        return self._arrays["now"]

    @property
    def reports(self) -> Any:
        """int32 on the device: [part, group, number of the report], flat."""
        return self._arrays["reports"]

    def begin(self, *, stream: int) -> None:
        """Sets all reports to zero."""
        self._device.make_current()
        reports = self.reports
        call("cuMemsetD32Async", reports.data_ptr(), 0, reports.shape[0], stream)

    def of(self, group: int = 0, moment: Moment = FIRST) -> Mapping[str, Any]:
        """The work memory of the call of this group at this moment."""
        shared = {name: self._arrays[name] for name in ("now", *self.shape.scratch)}
        turn = moment.copy % self.ring
        claims = {name: self._slice(name, turn, count) for name, count in self.shape.claims.items()}
        return shared | claims | {"report": self._report(group, moment.part)}

    def claims(self, group: int, moment: Moment) -> Claims:
        """The claims of this call; they hold until the ring comes round."""
        assert REPORT[0] == "claimed", "the first number of a report says how many were claimed"
        work = self.of(group, moment)
        return Claims(work["claimed_host_rows"], work["claimed_slots"], work["report"][:1])

    def report(self, group: int = 0, part: int = 0) -> dict[str, int]:
        """Reads a report; waits for the device, so for tests and audits."""
        numbers = self._report(group, part).tolist()
        assert min(numbers) >= 0, f"a count below zero: {numbers}"
        return dict(zip(REPORT, map(int, numbers), strict=True))

    def _report(self, group: int, part: int) -> Any:
        assert 0 <= group < self.group_count, f"group {group} of {self.group_count}"
        assert 0 <= part < self.part_max, f"part {part} of {self.part_max}"
        return self._slice("reports", part * self.group_count + group, len(REPORT))

    def _slice(self, name: str, number: int, count: int) -> Any:
        return self._arrays[name][number * count : (number + 1) * count]


def workspace_sizes(
    shape: ResolveShape, *, group_count: int = 1, part_max: int = 1, ring: int = 2
) -> dict[str, int]:
    """How many int32 numbers each array of ResidencyWorkspaces takes, by name."""
    claims = {name: ring * count for name, count in shape.claims.items()}
    reports = part_max * group_count * len(REPORT)
    return {"now": len(NOW), "reports": reports} | claims | shape.scratch


def now_of(
    *,
    step: int,
    ticket: int,
    query_count: int,
    landed: int = 0,
    behind: int = 0,
    stamps: bool = True,
) -> list[int]:
    """The numbers of `now`, in order.

    `ticket` is the last one given on its lane before this step: even for steps, odd for landings,
    so two apart. Copies of steps have landed up to `landed`, those of landings up to `behind`.
    """
    numbers = [step, ticket, landed, behind, query_count, int(stamps)]
    assert len(numbers) == len(NOW), "one number for each name"
    assert step > 0, f"step {step}"
    assert min(ticket, landed, behind) >= 0, f"tickets {ticket}, {landed}, {behind}"
    return numbers
