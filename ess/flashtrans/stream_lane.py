"""The copy lane of a CUDA device: a stream beside the compute stream, ordered by events.

A job follows everything that the caller has queued on the compute stream so far, as it reads rows
that compute has written and writes slots that compute has read. Compute does not wait for the job
by itself: `event.hold(stream)` makes a stream wait, `event.wait()` the host.

Host lists are checked and copied at submission. Device lists are read in place: the caller must not
change them before the event is done, and their numbers are trusted. Copies without a host list may
also be queued on the caller's stream, without a job: `queue`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ess.errors import BadState
from ess.flashtrans.mover import KernelWay, RowMover
from ess.flashtrans.row_lists import RowLists
from ess.flashtrans.staging import PLACE_BYTES, Staging
from ess.flashtrans.views import CheckedCopy, Side
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.rows import COPY_BLOCKS, PAIRS_MAX
from ess.kernels.cuda.streams import CudaEvent, CudaStream, let_go
from ess.kernels.streams import RowCopy, closed_lane

LaneWay = Literal["flat", "ring", "staged"]

ANCHOR_US_MAX: Final = 1e6


class StreamEvent:
    """A job of the lane, with times on the host's clock; `anchor` relates the device's clock to
    it."""

    def __init__(self, started: CudaEvent, finished: CudaEvent, anchor: Anchor) -> None:
        self._started = started
        self._finished = finished
        self._anchor = anchor

    def done(self) -> bool:
        return self._finished.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._finished.wait(timeout_s)

    def hold(self, stream: int) -> None:
        """Work queued on `stream` from now on waits for the job; the host does not."""
        self._finished.hold(stream)

    @property
    def started_ns(self) -> int:
        self._require_done()
        return self._anchor.ns_of(self._started)

    @property
    def finished_ns(self) -> int:
        self._require_done()
        return self.started_ns + int(1e3 * self._finished.us_since(self._started))

    def later_anchor(self) -> Anchor:
        """The anchor for the next job: the same, or this job's end when the old anchor lies so far
        back that float32 times from it are no longer exact."""
        if not self.done() or self._finished.us_since(self._anchor.event) < ANCHOR_US_MAX:
            return self._anchor
        assert self.finished_ns >= self._anchor.ns, "a job ended before its anchor"
        return Anchor(self._finished, self.finished_ns)

    def _require_done(self) -> None:
        if not self.done():
            raise BadState("the copy job is not done: it has no times yet")


@dataclass(frozen=True, slots=True)
class Anchor:
    """One moment on both clocks. The device counts float32 milliseconds from it."""

    event: CudaEvent
    ns: int

    @classmethod
    def now(cls, stream: CudaStream) -> Anchor:
        """Spins until the event has passed. Nothing else is queued yet, so this takes microseconds;
        a sleep would make every time wrong by its length."""
        event = stream.record()
        while not event.done():
            pass
        return cls(event, time.monotonic_ns())

    def ns_of(self, event: CudaEvent) -> int:
        return self.ns + int(1e3 * event.us_since(self.event))


@dataclass(frozen=True, slots=True)
class _Job:
    event: CudaEvent
    kept: list[Any]


class StreamLane:
    """Asks `compute_stream` at each submission for the stream that the job follows.

    In the way `staged` the host gathers with `threads` threads and the copy engine sends; this
    serves fetches with host lists. All other copies use the flat kernel.

    `_pending` keeps alive what jobs under way use; it outlives this object, because the finalizer,
    which waits for the jobs, holds it too.
    """

    def __init__(
        self,
        device: Device,
        *,
        compute_stream: Callable[[], int],
        way: LaneWay = "flat",
        block_count_max: int = COPY_BLOCKS,
        threads: int = 2,
        list_capacity: int = 1 << 20,
        place_bytes: int = PLACE_BYTES,
    ) -> None:
        self._device = device
        self._compute_stream = compute_stream
        self._way = way
        kernel_way: KernelWay = "ring" if way == "ring" else "flat"
        self._mover = RowMover(device, way=kernel_way, block_count_max=block_count_max)
        self._stream = CudaStream(device, priority=-1)
        self._lists = RowLists(device, capacity=list_capacity)
        self._staging = (
            Staging(device, place_bytes=place_bytes, threads=threads) if way == "staged" else None
        )
        self._order = threading.Lock()
        self._pending: deque[_Job] = deque()
        self._closed = False
        self._anchor = Anchor.now(self._stream)
        self._last = StreamEvent(self._anchor.event, self._anchor.event, self._anchor)
        weakref.finalize(self, let_go, device, self._pending)

    def submit(self, copies: Sequence[RowCopy]) -> StreamEvent:
        checked = [self._check(copy) for copy in copies]
        with self._order:
            if self._closed:
                raise closed_lane()
            self._forget()
            CudaEvent(self._device).record(self._compute_stream()).hold(self._stream.handle)
            started = self._stream.record()
            finished = self._queue_all(checked)
            self._anchor = self._last.later_anchor()
            self._last = StreamEvent(started, finished, self._anchor)
            return self._last

    def _queue_all(self, checked: list[CheckedCopy]) -> CudaEvent:
        """The event behind them. What is queued before something raises is kept too."""
        kept: list[Any] = list(checked)
        try:
            for copy in checked:
                self._queue(copy, kept)
        finally:
            finished = self._stream.record()
            self._pending.append(_Job(finished, kept))
        return finished

    def mark(self) -> StreamEvent:
        return self._last

    def close(self) -> None:
        with self._order:
            self._closed = True
        self._stream.synchronize()
        self._forget()
        assert not self._pending, f"{len(self._pending)} jobs are not done on an empty stream"

    def check(self) -> None:
        """Asks the latest job first: jobs go on while it asks."""
        with self._order:
            done = [job.event.done() for job in reversed(self._pending)]
            assert sorted(done) == done, "a job was done before an earlier one"
            self._lists.check()
            if self._staging is not None:
                self._staging.check()

    def __enter__(self) -> StreamLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, copy: RowCopy) -> CheckedCopy:
        checked = self._mover.check(copy)
        for side in (checked.source, checked.target):
            _require_in_range(side)
        return checked

    def _is_staged(self, copy: CheckedCopy) -> bool:
        fetch = copy.target.on_device and not copy.source.on_device
        device_lists = (copy.device_count, copy.source.device_rows, copy.target.device_rows)
        fits = self._staging is not None and self._staging.rows_max(copy.source.row_bytes) > 0
        return fits and fetch and not any(device_lists)

    def _queue(self, copy: CheckedCopy, kept: list[Any]) -> None:
        """Cuts the copy into pieces whose lists fit the ring of lists.

        The host must not gather a row that an earlier copy, maybe of the same job, has still to
        store. So every gather waits for `before`, which passes when all earlier copies are done.
        """
        before = self._stream.record()
        listed = copy.source.rows is not None or copy.target.rows is not None
        staged = self._is_staged(copy)
        most = self._lists.piece_max if listed or staged else PAIRS_MAX
        assert copy.device_count is None or most >= copy.count, "a counted copy in pieces"
        for first in range(0, copy.count, most):
            piece = _piece(copy, first, min(most, copy.count - first))
            if staged:
                self._queue_staged(piece, before, kept)
            else:
                self._move(piece)
            self._lists.seal(self._stream.record())

    def _queue_staged(self, piece: CheckedCopy, before: CudaEvent, kept: list[Any]) -> None:
        assert self._staging is not None, "picked without a staging area"
        target = _skipping(piece)
        spread = CheckedCopy(self._staging.as_source(piece), target)
        launch = self._mover.launch(spread, "flat", target_rows=self._put(target))
        self._staging.send(piece, launch, before, self._stream.handle, kept=kept)

    def _move(self, piece: CheckedCopy) -> None:
        launch = self._mover.launch(
            piece,
            "ring" if self._way == "ring" else "flat",
            source_rows=self._put(piece.source),
            target_rows=self._put(piece.target),
        )
        launch.queue(self._stream.handle)

    def _put(self, side: Side) -> int:
        """Copies a host list to the device; returns its address there, 0 if there is no list."""
        return 0 if side.rows is None else self._lists.put(side.rows, self._stream.handle)

    def _forget(self) -> None:
        while self._pending and self._pending[0].event.done():
            self._pending.popleft()


def _require_in_range(side: Side) -> None:
    if side.rows is None:
        return
    wrong = np.flatnonzero((side.rows < -1) | (side.rows >= side.row_count))
    if wrong.size:
        raise side.fault(int(wrong[0]), int(side.rows[wrong[0]]))


def _piece(copy: CheckedCopy, first: int, count: int) -> CheckedCopy:
    assert 0 <= first < first + count <= copy.count, f"rows {first}+{count} of {copy.count}"
    if count == copy.count:
        return copy
    return CheckedCopy(
        _side_piece(copy.source, first, count), _side_piece(copy.target, first, count)
    )


def _side_piece(side: Side, first: int, count: int) -> Side:
    assert first + count <= side.count, f"{side.name} {first}+{count} of {side.count}"
    if side.device_rows is not None:
        at = side.device_rows.address + 4 * first
        return replace(side, device_rows=replace(side.device_rows, address=at, count=count))
    if side.rows is not None:
        return replace(side, rows=side.rows[first : first + count])
    address = side.address + first * side.stride_bytes
    return replace(side, address=address, row_count=count)


def _skipping(piece: CheckedCopy) -> Side:
    """The target's list without the pairs that the source's list skips."""
    source, target = piece.source.rows, piece.target
    if source is None or not (source < 0).any():
        return target
    assert target.device_rows is None, "lists on the device are not staged"
    assert len(source) == target.count, f"{target.count} targets of {len(source)} sources"
    rows: npt.NDArray[Any] = target.row_numbers().astype(np.int32)
    return replace(target, rows=np.where(source < 0, -1, rows))
