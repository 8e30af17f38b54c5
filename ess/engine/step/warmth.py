"""How warm requests run: the resident rows among the rows that they selected, by the number of
steps since they landed.

Each query of a group selects all rows except those of whole units that it does not choose. A
resolution says how many of them could be attended at once; a row that is still on its way to its
slot is no hit. In a step whose rows were only located, all of them were resident. Where a device
counts, the counts come with the step's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.array_types import Counts
from ess.door.device.memory.uploads import Download
from ess.layout import ModelLayout

if TYPE_CHECKING:
    from ess.door import Resolution
    from ess.engine.plan import Turn

LANDED_STEPS: Final = 32


class SeenRows(Protocol):
    """Hits of each query of a step that the host has learned, and rows that it asked for."""

    def read(self) -> tuple[Counts, Counts]: ...


class HitCounter(Protocol):
    def resolved(self, part: range, where: Resolution) -> None: ...
    def located(self, part: range) -> None: ...
    def counted(self, hits: Counts, resolved_count: int, located_count: int) -> None:
        """Notes the hits of all queries in layers that were resolved or located together."""

    def seen(self) -> SeenRows:
        """The step's layers are launched."""


def hit_counter(lengths: Any, layout: ModelLayout) -> HitCounter:
    """The counter for a step whose queries may each select from `lengths` rows."""
    unit, most = layout.select_unit, layout.units_max
    if isinstance(lengths, Tensor):
        return DeviceHits(lengths - (lengths // unit - most).clamp_min(0) * unit)
    return HostHits(lengths, unit, most)


class HostHits:
    """How often each query of one step asked a group for its rows, how often all of them were
    there, and the hits of the other times."""

    def __init__(self, lengths: npt.NDArray[np.int32], unit: int, most: int) -> None:
        self._given = lengths, unit, most
        self._hits: Counts = np.zeros(len(lengths), np.int64)
        self._times: Counts | None = None
        self._whole = [0, 0]

    def resolved(self, part: range, where: Resolution) -> None:
        assert 0 <= part.start < part.stop <= len(self._hits), f"{part} of {len(self._hits)}"
        mine = slice(part.start, part.stop)
        self._hits[mine] += where.hit_count.numpy()
        self._times_of_parts()[0, mine] += 1

    def located(self, part: range) -> None:
        assert 0 <= part.start < part.stop <= len(self._hits), f"{part} of {len(self._hits)}"
        self._times_of_parts()[:, part.start : part.stop] += 1

    def _times_of_parts(self) -> Counts:
        if self._times is None:
            self._times = np.zeros((2, len(self._hits)), np.int64)
        return self._times

    def counted(self, hits: Counts, resolved_count: int, located_count: int) -> None:
        if resolved_count:
            self._hits += hits
        self._whole[0] += resolved_count + located_count
        self._whole[1] += located_count

    def seen(self) -> HostHits:
        return self

    def read(self) -> tuple[Counts, Counts]:
        lengths, unit, most = self._given
        if unit == 1:
            each = np.minimum(lengths, np.int64(most))
        else:
            each = lengths - np.maximum(lengths // unit - most, 0) * np.int64(unit)
        if self._times is None:
            asked, all_there = each * self._whole[0], each * self._whole[1]
        else:
            asked, all_there = (self._times + np.array(self._whole)[:, None]) * each
        return self._hits + all_there, asked


def _sums(counts: Counts, firsts: Sequence[int]) -> list[int]:
    """Over the queries of each sequence."""
    summed = counts if len(counts) == len(firsts) else np.add.reduceat(counts, firsts)
    sums: list[int] = summed.tolist()
    return sums


class DeviceHits:
    """What `HostHits` counts, for a step on a device."""

    def __init__(self, each: Tensor) -> None:
        self._each = each.long()
        self._both = torch.zeros((2, len(each)), dtype=torch.int64, device=each.device)

    def resolved(self, part: range, where: Resolution) -> None:
        mine = slice(part.start, part.stop)
        self._both[0, mine] += where.hit_count
        self._both[1, mine] += self._each[mine]

    def located(self, part: range) -> None:
        mine = slice(part.start, part.stop)
        self._both[:, mine] += self._each[mine]

    def counted(self, hits: Counts, resolved_count: int, located_count: int) -> None:
        raise AssertionError("a device resolves layer by layer")

    def seen(self) -> DeviceSeenRows:
        return DeviceSeenRows(Download(self._both))


class DeviceSeenRows:
    """Pads after the queries have asked for no rows."""

    def __init__(self, both: Download) -> None:
        self._both = both

    def read(self) -> tuple[Counts, Counts]:
        hits, asked = self._both.read().numpy()
        return hits, asked


class Warmth:
    """Since the start: `hits[i]` and `asked[i]` are of requests in their step i after landing."""

    def __init__(self) -> None:
        self.hits: Counts = np.zeros(LANDED_STEPS, np.int64)
        self.asked: Counts = np.zeros(LANDED_STEPS, np.int64)

    def stepped(self, turns: Sequence[Turn], firsts: Sequence[int], seen: SeenRows) -> None:
        """Adds the step's counts here and to each request's own counts."""
        assert len(turns) == len(firsts), f"{len(firsts)} first queries of {len(turns)} turns"
        hits, asked = (_sums(counts, firsts) for counts in seen.read())
        for turn, hit_count, asked_count in zip(turns, hits, asked, strict=True):
            request = turn.request
            assert 0 <= hit_count <= asked_count, f"{hit_count} hits of {asked_count}"
            if request.turn_count < LANDED_STEPS:
                self.hits[request.turn_count] += hit_count
                self.asked[request.turn_count] += asked_count
            request.turn_count += 1
            request.hit_count += hit_count
            request.asked_count += asked_count
