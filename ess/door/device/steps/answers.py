"""What a call of a device's slots leaves behind: where rows are, when they will be, what ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ess.array_types import Counts
from ess.door.device.steps.stopwatch import TimedFetch
from ess.door.residency.slots import SplitViews
from ess.kernels.cuda.streams import CudaEvent
from ess.overlap.timeline import Note


@dataclass(frozen=True, slots=True)
class DeviceFetch:
    """One layer's copy: the step's `copy`-th, complete with the last layer of its group."""

    hold: Callable[[DeviceFetch], None]
    event: CudaEvent
    copy: int
    is_last: bool
    timed: TimedFetch | None

    def ask(self) -> None:
        return

    def wait(self) -> None:
        self.hold(self)

    @property
    def is_done(self) -> bool:
        """Always False: the host does not know, and no queued work depends on it."""
        return False


@dataclass(slots=True, eq=False)
class DeviceSplit:
    """Where a part's answer lies, with the names of ess.pool.lru.arena."""

    slots: Tensor
    hit: Tensor
    miss: Tensor
    place: Tensor
    hit_count: Tensor
    miss_count: Tensor
    place_count: Tensor

    @classmethod
    def create(cls, query_max: int, top_k: int, home: torch.device) -> DeviceSplit:
        lists = torch.full((4, query_max, top_k), -1, dtype=torch.int32, device=home)
        counts = torch.zeros((3, query_max), dtype=torch.int32, device=home)
        return cls(*lists.unbind(), *counts.unbind())

    def views(self, count: int) -> SplitViews:
        lists = self.hit[:count], self.miss[:count], self.place[:count], self.slots[:count]
        counts = self.hit_count[:count], self.miss_count[:count], self.place_count[:count]
        return *lists, *counts


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the calls of a step have queued, as far as its seal has to know."""

    copy_count: int
    written: tuple[range, ...]
    resolved: Counts
    notes: tuple[Note, ...]
