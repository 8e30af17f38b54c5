"""Where the rows of a step are: the layer between a step and the memory that attention reads.

A `Step` checks its arguments and knows what has been asked of it; a `Placement` puts new rows into
memory, finds selected rows and ends the step. This library's placement is `Slots`: rows in slots of
the sparse pool, fetched from the host when they are absent. Others wrap it or take its place.

Arrays of a call (`Array`) are what the step was given, checked for type and shape. `queries` are
numbers of the step's queries; a `range` is a part of neighbours, and parts come in batch order.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ess.door.steps.arrays import Array, Kept
from ess.door.steps.direct import Direct
from ess.pool.warmup import WindowSet

if TYPE_CHECKING:
    from ess.door.sequences.sequence import Sequence
    from ess.door.steps.step import Step

__all__ = ["Array", "Fetch", "Kept", "LayerMemory", "Placement", "Resolution"]


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one layer's kernels read, where it lies.

    `slots` [slab rows, row_bytes] has the hits and misses, `host` [host rows, row_bytes] the rows
    that are read in place. All are uint8.

    `key_pages` [active pages, page_bytes] has the index keys of the layer's group, 64 in a page.
    fp8: 64 x key_dim values, then 64 float32 scales, one for each key. f32: 64 x key_dim floats and
    no scale. A sequence's pages are in the order of its `page_table`: the key of position p is
    number p % 64 of page page_table[p // 64].
    """

    slots: Tensor
    host: Tensor
    key_pages: Tensor


class Fetch(Protocol):
    """A layer's copy under way."""

    def ask(self) -> None:
        """The layer has reached the point where it needs the rows: from here on the copy may cost
        waiting time."""

    def wait(self) -> None:
        """Returns when what follows may read the rows."""

    @property
    def is_done(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Resolution:
    """Where the selected rows of one layer are. All tensors are [queries, k], -1 padded.

    `hit` rows can be attended now, `miss` rows after `wait()`; both are rows of the layer's
    `LayerMemory.slots`. `place` rows have no slot: they are rows of its `host`, always readable.
    `slots` has all of them in the order of the selection, for one pass after `wait()`: a slot, -1
    for padding, or -2 - host row. The tensors are views into a workspace, valid until another group
    is resolved into the same one.
    """

    hit: Tensor
    miss: Tensor
    place: Tensor
    slots: Tensor
    hit_count: Tensor
    miss_count: Tensor
    place_count: Tensor
    fetch: Fetch | None = None

    def wait(self) -> Resolution:
        """Returns when every missed row has landed in its slot."""
        if self.fetch is not None:
            self.fetch.wait()
        return self

    @property
    def is_ready(self) -> bool:
        return self.fetch is None or self.fetch.is_done


class Placement(Protocol):
    @property
    def direct(self) -> Direct | None:
        """For layers that run in one native call; None where there are none."""

    @property
    def new_rows_max(self) -> int:
        """The most queries that a step may bring."""

    def memory(self, layer: int) -> LayerMemory: ...

    def begin(self, step: Step) -> None:
        """A step begins. What its sequences have so far is on the host."""

    def append(self, step: Step, layer: int, queries: range, rows: Array, keys: Array) -> None:
        """New rows of a layer, uint8 [queries, row_bytes], and their index keys or None."""

    def places(self, step: Step, layer: int, queries: range) -> Tensor:
        """Slots of the step's new rows of these queries in this layer's group."""

    def resolve(
        self,
        step: Step,
        group: int,
        queries: range,
        selection: Array,
        *,
        workspace: int,
        waits: bool,
    ) -> tuple[Resolution, ...]:
        """One for each layer of the group; absent rows are under way to all of them."""

    def observe(
        self, step: Step, layer: int, queries: range, selection: Array, logits: Array
    ) -> None:
        """Takes the indexer's logits for every position of these queries, before they are
        resolved."""

    def locate(self, step: Step, layer: int, queries: Many[int], selection: Array) -> Tensor:
        """Slots of the selected rows, -1 where one is absent. Nothing is fetched."""

    def locate_all(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor | None:
        """`locate`, as an answer that is attended: None when a selected row is absent."""

    def host_codes(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor:
        """Codes that read the truth on the host, even where a row is resident."""

    def record(self, step: Step) -> object:
        """A recording of the step's queued calls, for steps that replay them."""

    def replay(self, step: Step, recorded: object) -> None:
        """Notes that a graph has queued the recorded calls again."""

    def seal(self, step: Step, accepted: Kept) -> None:
        """Keeps the first `accepted` new rows of each sequence and drops the others."""

    def warm(self, sequence: Sequence, windows: Array) -> None:
        """Selections of late prefill queries, [groups, windows, k], oldest first."""

    def warm_from(self, sequence: Sequence, sets: Iterable[WindowSet], window_count: int) -> None:
        """The same, from what `last_windows` makes of each group's windows."""

    def fill(self, sequence: Sequence, row_max: int | None) -> int:
        """The sequence's first absent rows into free room; how many were started."""
