"""How warm requests run: the rows that they found resident, by the step after they landed.

A query of a group asks for min(length, top_k) rows. A resolution says how many of them could be
attended at once; a row that is still on its way to its slot is no hit. A step whose rows were only
located found all of them. The counts are read on the host; a planner on a device would have to hand
them over with the step's results instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ess.door import Resolution
    from ess.engine.plan import Turn

LANDED_STEPS: Final = 32

Counts = npt.NDArray[np.int64]


class StepWarmth:
    """Of one step: rows asked for by each query over all groups, and of those the hits. `each` is
    what a query asks of one group."""

    def __init__(self, each: npt.NDArray[np.int32]) -> None:
        self.hits: Counts = np.zeros(len(each), np.int64)
        self.asked: Counts = np.zeros(len(each), np.int64)
        self._each = each

    def resolved(self, part: range, where: Resolution) -> None:
        assert 0 <= part.start < part.stop <= len(self.hits), f"{part} of {len(self.hits)} queries"
        mine = slice(part.start, part.stop)
        self.hits[mine] += where.hit_count.numpy()
        self.asked[mine] += self._each[mine]

    def located(self, part: range) -> None:
        assert 0 <= part.start < part.stop <= len(self.hits), f"{part} of {len(self.hits)} queries"
        mine = slice(part.start, part.stop)
        self.hits[mine] += self._each[mine]
        self.asked[mine] += self._each[mine]


class Warmth:
    """Since the start: `hits[i]` and `asked[i]` are of requests in their step i after landing."""

    def __init__(self) -> None:
        self.hits: Counts = np.zeros(LANDED_STEPS, np.int64)
        self.asked: Counts = np.zeros(LANDED_STEPS, np.int64)

    def stepped(self, turns: Sequence[Turn], firsts: Sequence[int], seen: StepWarmth) -> None:
        """Adds the step's counts here and to each request's own counts."""
        assert len(turns) == len(firsts), f"{len(firsts)} first queries of {len(turns)} turns"
        hits = np.add.reduceat(seen.hits, firsts).tolist()
        asked = np.add.reduceat(seen.asked, firsts).tolist()
        for turn, hit_count, asked_count in zip(turns, hits, asked, strict=True):
            request = turn.request
            assert 0 <= hit_count <= asked_count, f"{hit_count} hits of {asked_count}"
            if request.turn_count < LANDED_STEPS:
                self.hits[request.turn_count] += hit_count
                self.asked[request.turn_count] += asked_count
            request.turn_count += 1
            request.hit_count += hit_count
            request.asked_count += asked_count
