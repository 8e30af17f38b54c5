"""How native code goes from selections to rows, for layers that run in one call.

A layer that runs in such a call does what `Step.append` and `Step.locate_all`, or `Step.resolve`
with `waits`, would do, in the same order. What it decides is the pools' own planner's; what it
counts comes back in the records (`ess.kernels.cpu.layer`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ess.array_types import Ints
from ess.kernels.cpu.layer import Layers

if TYPE_CHECKING:
    from ess.door.steps.step import Step


class Direct(Protocol):
    """What native code needs to find slots that lie on the host. Layers are neighbours, and each is
    alone in its group. `tables` [lines, pages] are the page tables, which stay where they are."""

    tables: Ints

    def bind(self, layers: Layers, which: range) -> None:
        """Writes what stays, once."""

    def enter(self, step: Step, layers: Layers, which: range, *, resident: list[bool]) -> None:
        """Prepares the call: new rows get slots. In layers that are not `resident`, rows will be
        fetched."""

    def resolve(self, layers: Layers, layer: int) -> None:
        """A row that was to be resident has no slot: the layer's rows are to be fetched."""

    def settle(self, step: Step, layers: Layers, layer: int) -> None:
        """Returns when the layer's rows can be attended: waits for their fetch, names rows that are
        read in place."""

    def leave(self, step: Step, layers: Layers, which: range, *, claimed_count: int) -> None:
        """Called after the call: counts what has happened; native code claimed and copied
        `claimed_count` rows."""
