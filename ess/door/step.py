"""What an engine holds during a step: the step itself and, per layer, a resolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ess.door.sequence import Sequence
from ess.door.workspace import Part
from ess.kernels.streams import Event
from ess.pool.index import PageTables
from ess.pool.lru.arena import FetchPlan

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A leader's resolution, with one event per layer of its group."""

    plan: FetchPlan
    part: Part
    query_count: int
    may_name_new: bool
    events: tuple[Event | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A batch of sequences and how many new rows each brings. Made by `Offload.begin`.

    The counts are the host's. The arrays are the device's: they follow from lengths that the host
    may not have learned yet.
    `appended` layers and `keyed` groups are complete; the counts say how many queries have theirs.
    """

    number: int
    sequences: tuple[Sequence, ...]
    query_counts: tuple[int, ...]
    rows: Rows
    query_line: Rows
    query_start: Rows
    query_offset: Rows
    query_stop: Rows
    query_count: int = field(init=False)
    claimed: dict[int, Rows] = field(default_factory=dict)
    appended: set[int] = field(default_factory=set)
    keyed: set[int] = field(default_factory=set)
    row_counts: dict[int, int] = field(default_factory=dict)
    key_counts: dict[int, int] = field(default_factory=dict)
    resolved: dict[tuple[int, int], Resolved] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "query_count", len(self.rows))

    @property
    def firsts(self) -> list[int]:
        """The first query of each sequence."""
        return [sum(self.query_counts[:i]) for i in range(len(self.query_counts))]

    def lengths(self, layer: int) -> Rows:
        """What each query may select: up to itself once its new row of this layer is there."""
        count = self.row_counts.get(layer, 0)
        if count == self.query_count:
            return self.query_stop
        lengths = self.query_start.copy()
        lengths[:count] += self.query_offset[:count] + np.int32(1)
        return lengths


def new_step(
    number: int, sequences: tuple[Sequence, ...], counts: list[int], tables: PageTables
) -> Step:
    """Rows behind the device's own lengths, in pages that the host has provided for its bound."""
    per_query = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum([0, *counts[:-1]]).astype(np.int32)
    lines = np.array([sequence.line for sequence in sequences], np.int32)[per_query]
    offsets = np.arange(len(per_query), dtype=np.int32) - firsts[per_query]
    starts = tables.lengths[lines]
    assert (starts >= 0).all(), "a line without a length"
    return Step(
        number=number,
        sequences=sequences,
        query_counts=tuple(counts),
        rows=tables.rows_at(lines, starts + offsets),
        query_line=lines,
        query_start=starts,
        query_offset=offsets,
        query_stop=starts + offsets + np.int32(1),
    )


@dataclass(slots=True, eq=False)
class Resolution:
    """Where the selected rows of one layer are. All tensors are [queries, k], -1 padded.

    `hit` rows can be attended now, `miss` rows after `wait()`; both are rows of
    `Offload.slots(layer)`. `place` rows found no slot: they are rows of `Offload.host(layer)`,
    always readable. `slots` has all of them in the order of the selection, for one pass after
    `wait()`: a slot, -1 for padding, or -2 - host row. The tensors are views into the offload's
    workspace, valid until the same part of another group is resolved.
    """

    hit: torch.Tensor
    miss: torch.Tensor
    place: torch.Tensor
    slots: torch.Tensor
    hit_count: torch.Tensor
    miss_count: torch.Tensor
    place_count: torch.Tensor
    _event: Event | None
    _settle: Callable[[Event], None]

    def wait(self) -> Resolution:
        """Returns when every missed row has landed in its slot."""
        if self._event is not None:
            self._settle(self._event)
        return self

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.done()


def as_resolution(
    resolved: Resolved, event: Event | None, settle: Callable[[Event], None]
) -> Resolution:
    return Resolution(*resolved.part.views.top(resolved.query_count), event, settle)
