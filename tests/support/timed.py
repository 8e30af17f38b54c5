"""A lane and ops whose time is simulated: every copy and every stage takes the time that the test
sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ess.flashtrans.rows import run_numpy
from ess.flashtrans.views import CheckedCopy, check
from ess.kernels.streams import RowCopy
from tests.support.manual_clock import ManualClock
from tests.support.manual_lane import with_own_lists


@dataclass(eq=False)
class TimedJob:
    lane: TimedLane
    started_ns: int
    finished_ns: int
    row_count: int
    copies: list[CheckedCopy] = field(repr=False)

    def done(self) -> bool:
        self.lane.settle()
        return self not in self.lane.pending

    def wait(self, timeout_s: float | None = None) -> None:
        self.lane.clock.advance(max(0.0, (self.finished_ns - self.lane.now_ns()) / 1e9))
        assert self.done()


class TimedLane:
    """One copy after another, `row_ns` a row; a row is there when its copy ends and not before."""

    def __init__(self, clock: ManualClock, *, row_ns: int) -> None:
        self.clock = clock
        self.row_ns = row_ns
        self.pending: deque[TimedJob] = deque()
        self.jobs: list[TimedJob] = []

    def now_ns(self) -> int:
        return round(self.clock.now_s() * 1e9)

    def submit(self, copies: Sequence[RowCopy]) -> TimedJob:
        checked = [with_own_lists(check(copy)) for copy in copies]
        row_count = sum(len(copy.source.row_numbers()) for copy in checked)
        free_ns = self.jobs[-1].finished_ns if self.jobs else 0
        start_ns = max(self.now_ns(), free_ns)
        job = TimedJob(self, start_ns, start_ns + row_count * self.row_ns, row_count, checked)
        self.pending.append(job)
        self.jobs.append(job)
        return job

    def mark(self) -> TimedJob:
        return self.jobs[-1] if self.jobs else self.submit([])

    def settle(self) -> None:
        while self.pending and self.pending[0].finished_ns <= self.now_ns():
            for copy in self.pending.popleft().copies:
                run_numpy(copy)

    def close(self) -> None:
        self.clock.advance(1e6)
        self.settle()


@dataclass
class TimedOps:
    """Real ops; attention takes `attend_ns` per attended row, a selection `select_ns` per query."""

    real: Any
    clock: ManualClock
    attend_ns: int
    select_ns: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def attend(self, queries: torch.Tensor, rows: Any, slots: torch.Tensor, *rest, **named) -> Any:
        self.clock.advance(int((slots != -1).sum()) * self.attend_ns / 1e9)
        return self.real.attend(queries, rows, slots, *rest, **named)

    def index_top_k(self, queries: torch.Tensor, *rest, **named) -> Any:
        self.clock.advance(len(queries) * self.select_ns / 1e9)
        return self.real.index_top_k(queries, *rest, **named)
