"""The memory that residency calls work in: shared by all layer groups, since calls take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ess.errors import BadInput
from ess.kernels.cuda.driver import Device, call
from ess.pool.lru.cuda_shape import FIRST, NOW, REPORT, Moment, ResolveShape

MakeInts = Callable[[int], Any]


class Claims(NamedTuple):
    """Rows of the host to copy into slots: the first `count` (int32 [1], on the device) of both.

    A negative host row is of a page that is on no host, which the report counts as unwritten.
    """

    host_rows: Any
    slots: Any
    count: Any


class ResidencyWorkspaces:
    """`now`, and for each call what it works in, what it claims and what it reports.

    Calls are queued on one stream, so all share `now` and what their phases hand to one another. A
    copy reads what a call has claimed while later calls run, so claims lie in a ring: the i-th call
    of a step takes its i-th place. `ring` consecutive calls do not overwrite one another; the one
    after them may be queued when its stream waits for the copy of the first. Two are enough where a
    group's halves are planned one after the other, three where two halves of a batch take turns.

    Reports are counted per group and part of a step, so that one reading behind the step has all
    its counters. A report holds for one call: `begin` clears them all, at the head of a step, when
    no copy of the step before it is under way.
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
        """int32 on the device, as `now_of` has it: written before the first call of a step."""
        return self._arrays["now"]

    @property
    def reports(self) -> Any:
        """int32 on the device: [part, group, number of the report], flat."""
        return self._arrays["reports"]

    def begin(self, *, stream: int) -> None:
        """Reports are zero from here on."""
        self._device.make_current()
        reports = self.reports
        call("cuMemsetD32Async", reports.data_ptr(), 0, reports.shape[0], stream)

    def of(self, group: int = 0, moment: Moment = FIRST) -> Mapping[str, Any]:
        """What a call of this group at this moment works in."""
        shared = {name: self._arrays[name] for name in ("now", *self.shape.scratch)}
        turn = moment.copy % self.ring
        claims = {name: self._slice(name, turn, count) for name, count in self.shape.claims.items()}
        return shared | claims | {"report": self._report(group, moment.part)}

    def claims(self, group: int, moment: Moment) -> Claims:
        """What this call has claimed; holds until the ring comes round."""
        assert REPORT[0] == "claimed", "the first number of a report says how many were claimed"
        work = self.of(group, moment)
        return Claims(work["claimed_host_rows"], work["claimed_slots"], work["report"][:1])

    def report(self, group: int = 0, part: int = 0) -> dict[str, int]:
        """Waits for the device; for tests and audits."""
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
    """How many int32 numbers ResidencyWorkspaces takes, by name."""
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
    """The numbers of `now`, in their order.

    `ticket` is the last one given before this step on its lane: even for steps, odd for landings,
    two apart. Up to `landed` all copies of steps have landed, up to `behind` those of landings.
    """
    numbers = [step, ticket, landed, behind, query_count, int(stamps)]
    assert len(numbers) == len(NOW), "one number for each name"
    assert step > 0, f"step {step}"
    assert min(ticket, landed, behind) >= 0, f"tickets {ticket}, {landed}, {behind}"
    return numbers
