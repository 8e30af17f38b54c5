"""The matrices that resolutions are handed out in: made once, reused part by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ess.pool.arena import Split
from ess.pool.index import IndexPool

Matrix = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part's selection as row ids and the planner's answer, good for every layer of a group."""

    rows: Matrix
    split: Split


def make_part(query_max: int, top_k: int) -> Part:
    return Part(
        rows=np.empty((query_max, top_k), np.int32),
        split=Split.create(query_count=query_max, top_k=top_k),
    )


def name_host_rows(split: Split, query_count: int, index: IndexPool) -> None:
    """Rows served in place leave the planner as row ids; the caller reads them by host row."""
    place = split.place[:query_count]
    placed = place >= 0
    place[placed] = index.host_rows(place[placed])
    slots = split.slots[:query_count]
    coded = slots < -1
    slots[coded] = -2 - index.host_rows(-2 - slots[coded])
