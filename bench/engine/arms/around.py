"""A placement that wraps another: calls are passed on unless a subclass changes them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from torch import Tensor

from ess.door import LayerMemory, Placement, Resolution, Sequence, Step
from ess.door.residency.slots import Slots
from ess.door.steps.placement import Array, Kept
from ess.pool.warmup import WindowSet


class Around:
    """Give `over` to an offload as its placement: `Offload.create(placement=made.over)`."""

    slots: Slots

    def over(self, slots: Slots) -> Placement:
        self.slots = slots
        return self

    @property
    def direct(self) -> None:
        """None, so that every call comes through this object."""

    @property
    def new_rows_max(self) -> int:
        return self.slots.new_rows_max

    def memory(self, layer: int) -> LayerMemory:
        return self.slots.memory(layer)

    def begin(self, step: Step) -> None:
        self.slots.begin(step)

    def append(self, step: Step, layer: int, queries: range, rows: Array, keys: Array) -> None:
        self.slots.append(step, layer, queries, rows, keys)

    def places(self, step: Step, layer: int, queries: range) -> Tensor:
        return self.slots.places(step, layer, queries)

    def record(self, step: Step) -> object:
        return self.slots.record(step)

    def replay(self, step: Step, recorded: object) -> None:
        self.slots.replay(step, recorded)

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
        self.before_resolve(step, group, queries, selection)
        return self.slots.resolve(step, group, queries, selection, workspace=workspace, waits=waits)

    def before_resolve(self, step: Step, group: int, queries: range, selection: Array) -> None:
        """For subclasses that look at a selection, or change residency, before it is resolved."""

    def observe(
        self, step: Step, layer: int, queries: range, selection: Array, logits: Array
    ) -> None:
        self.slots.observe(step, layer, queries, selection, logits)

    def locate(self, step: Step, layer: int, queries: Many[int], selection: Array) -> Tensor:
        return self.slots.locate(step, layer, queries, selection)

    def locate_all(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor | None:
        return self.slots.locate_all(step, layer, queries, selection)

    def host_codes(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor:
        return self.slots.host_codes(step, layer, queries, selection)

    def seal(self, step: Step, accepted: Kept) -> None:
        self.slots.seal(step, accepted)

    def warm(self, sequence: Sequence, windows: Array) -> None:
        self.slots.warm(sequence, windows)

    def warm_from(self, sequence: Sequence, sets: Iterable[WindowSet], window_count: int) -> None:
        self.slots.warm_from(sequence, sets, window_count)

    def fill(self, sequence: Sequence, row_max: int | None) -> int:
        return self.slots.fill(sequence, row_max)
