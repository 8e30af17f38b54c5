"""Row copies queued on the caller's stream, with lists and counts on the device.

Nothing here waits, asks an event, or passes numbers through memory that is used again. So the
queued work may be captured into a graph: a replay moves the rows that the lists and the count name
at that moment. A copy's memory is checked when the copy is prepared, and must live as long as
replays do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ess.errors import BadInput
from ess.flashtrans.views import CheckedCopy, Side, check
from ess.kernels.cuda.driver import Device, Kernel, attempt
from ess.kernels.cuda.program import HOPPER
from ess.kernels.cuda.rows import (
    MoveForm,
    MoveRecord,
    flat_form,
    move_record,
    ring_form,
    widest_unit,
)
from ess.kernels.cuda.streams import CudaEvent
from ess.kernels.streams import RowCopy

KernelWay = Literal["flat", "ring"]

INT32_ROWS_MAX: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel over the rows of one copy."""

    kernel: Kernel
    record: MoveRecord
    form: MoveForm
    block_count_max: int

    def queue(self, stream: int) -> None:
        self.kernel.launch(
            self.record,
            blocks=self.form.blocks(self.record.count_max, block_count_max=self.block_count_max),
            threads=self.form.threads,
            stream=stream,
            shared_bytes=self.form.shared_bytes,
        )


@dataclass(frozen=True, slots=True)
class PreparedCopies:
    """Checked copies; queueing them costs one launch each."""

    launches: tuple[Launch, ...]
    kept: tuple[CheckedCopy, ...]

    def queue(
        self, stream: int, *, after: CudaEvent | None = None, then: CudaEvent | None = None
    ) -> None:
        """Makes the stream wait for `after`, queues the copies, then records `then`."""
        if after is not None:
            after.hold(stream)
        for launch in self.launches:
            launch.queue(stream)
        if then is not None:
            then.record(stream)


class RowMover:
    """Copies rows of a device by kernels, on up to `block_count_max` blocks each."""

    def __init__(
        self, device: Device, *, way: KernelWay = "flat", block_count_max: int = 4
    ) -> None:
        if not 1 <= block_count_max <= device.sm_count:
            raise BadInput(
                f"block_count_max is {block_count_max}, must be 1..{device.sm_count} here"
            )
        if way == "ring" and device.capability < HOPPER:
            raise BadInput(f"way is ring, and {device.name} has no bulk copies: take flat")
        self._device = device
        self._way = way
        self._block_count_max = block_count_max

    def prepare(self, copies: Sequence[RowCopy]) -> PreparedCopies:
        """Checks copies and loads the programs they need. BadInput if any copy is wrong."""
        checked = tuple(self.check(copy) for copy in copies)
        for copy in checked:
            for side in (copy.source, copy.target):
                if side.rows is not None:
                    raise BadInput(f"{side.name}_rows is on the host: submit such copies to a lane")
        launches = (self.launch(copy, self._way) for copy in checked if copy.count)
        return PreparedCopies(tuple(launches), checked)

    def queue(
        self,
        copies: Sequence[RowCopy],
        stream: int,
        *,
        after: CudaEvent | None = None,
        then: CudaEvent | None = None,
    ) -> None:
        self.prepare(copies).queue(stream, after=after, then=then)

    def check(self, copy: RowCopy) -> CheckedCopy:
        checked = check(copy, devices=True)
        sides = (checked.source, checked.target)
        if not any(side.on_device for side in sides):
            raise BadInput("neither source nor target is on a device: use a lane of the CPU")
        for side in sides:
            if side.row_count > INT32_ROWS_MAX:
                raise BadInput(f"{side.name} has {side.row_count} rows, at most {INT32_ROWS_MAX}")
            if not side.on_device:
                self._require_registered(side)
        return checked

    def launch(
        self, copy: CheckedCopy, way: KernelWay, *, source_rows: int = 0, target_rows: int = 0
    ) -> Launch:
        """A kernel for the copy; host lists are named by their copies' addresses on the device."""
        assert copy.count > 0, "a copy without rows"
        assert copy.target.count == copy.count, f"{copy.target.count} targets of {copy.count}"
        record = move_record(
            source=copy.source.address,
            source_stride=copy.source.stride_bytes,
            source_rows=source_rows or _list(copy.source),
            target=copy.target.address,
            target_stride=copy.target.stride_bytes,
            target_rows=target_rows or _list(copy.target),
            pair_count=copy.count,
            count=0 if copy.device_count is None else copy.device_count.address,
            lines_of_target=not copy.target.on_device,
        )
        form = _form(copy, way, self._device.shared_bytes)
        kernel = self._device.kernel(form.program, form.entry, shared_bytes=form.shared_bytes)
        return Launch(kernel, record, form, self._block_count_max)

    def _require_registered(self, side: Side) -> None:
        if not side.row_count or _is_pinned(side.owner):
            return
        self._device.make_current()
        for address in (side.address, side.address + (side.row_count - 1) * side.stride_bytes):
            status, *seen = attempt("cuMemHostGetDevicePointer", address, 0)
            if status or int(seen[0]) != address:
                raise BadInput(
                    f"{side.name} is host memory that the device cannot reach: take it from "
                    "pinned_memory or register it"
                )


def _is_pinned(owner: Any) -> bool:
    """Whether torch itself has registered this memory."""
    asks = getattr(owner, "is_pinned", None)
    return asks is not None and bool(asks())


def _list(side: Side) -> int:
    assert side.device_rows is not None or side.rows is None, f"{side.name}_rows is on the host"
    return 0 if side.device_rows is None else side.device_rows.address


def _form(copy: CheckedCopy, way: KernelWay, shared_max: int) -> MoveForm:
    sides = (copy.source, copy.target)
    numbers = [number for side in sides for number in (side.address, side.stride_bytes)]
    row_bytes = copy.source.row_bytes
    if way == "ring" and widest_unit(row_bytes, *numbers) == 16:
        return ring_form(row_bytes, *numbers, shared_max=shared_max)
    return flat_form(row_bytes, *numbers)
