"""Lanes and events: how a copy runs beside compute, whatever the device.

A lane takes jobs and runs them one after another, in the order of submission. A job is a list of
row copies that share one event. A lane copies the index lists at submission, so the caller may
reuse them at once; the matrices must stay what they are until the event is done, and so must lists
that lie on a device.

    event = lane.submit([RowCopy(source=pool, source_rows=missing, target=slots, target_rows=free)])
    attend(resident)
    event.wait()
    attend(fetched)

Nothing in here knows a device. Backends: ess.flashtrans, for the CPU and for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from ess.errors import BadState


class Tensor(Protocol):
    """The part of a torch tensor that lanes use; torch itself is never imported for it."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Any: ...
    def numpy(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class KnownMatrix:
    """A matrix on the host whose shape and strides `ess.flashtrans.views.known` has checked. It
    holds as long as the memory stays where it is."""

    owner: object
    address: int
    row_count: int
    row_bytes: int
    stride_bytes: int


RowMatrix: TypeAlias = npt.NDArray[Any] | Tensor | KnownMatrix
IndexList: TypeAlias = npt.NDArray[Any] | Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCopy:
    """Row source_rows[i] of `source` goes to row target_rows[i] of `target`, for every i.

    A matrix is two-dimensional and dense within a row; what its elements are does not matter. A
    list is int32 or int64; -1 skips the pair; without a list the rows are 0, 1, 2, ... Targets that
    are named twice or overlap a source are the caller's mistake: what they then hold is undefined.

    `count` is one int32 on a device: only the first `count` pairs are copied, as many as it says
    when the copy runs. No list may then lie on the host.
    """

    source: RowMatrix
    source_rows: IndexList = None
    target: RowMatrix
    target_rows: IndexList = None
    count: Tensor | None = None


class Event(Protocol):
    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the job's rows are in place; TimeoutError when the time is over."""

    @property
    def started_ns(self) -> int:
        """On the clock of time.monotonic_ns, once done; BadState before."""

    @property
    def finished_ns(self) -> int: ...


def closed_lane() -> BadState:
    """What a closed lane answers to a job."""
    return BadState("the lane is closed: it takes no more copies")


class Lane(Protocol):
    def submit(self, copies: Sequence[RowCopy]) -> Event:
        """BadInput if any copy is wrong (then none is queued), BadState on a closed lane."""

    def mark(self) -> Event:
        """Done when everything submitted so far is."""

    def close(self) -> None:
        """Finishes what was submitted and takes no more. A second call does nothing."""
