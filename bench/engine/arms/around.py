"""A placement that wraps another: what a subclass does not define is the other's."""

from __future__ import annotations

from typing import Any, Final, cast

from ess.door import Placement, Resolution, Step
from ess.door.residency.slots import Slots
from ess.door.steps.placement import Array


class WrappedPlacement:
    """Give `over` to an offload as its placement: `Offload.create(placement=made.over)`."""

    slots: Slots
    direct: Final = None
    """None, so that every call comes through this object."""

    def over(self, slots: Slots) -> Placement:
        self.slots = slots
        return cast(Placement, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["slots"], name)

    def resolve(
        self, step: Step, group: int, queries: range, selection: Array, **how: Any
    ) -> tuple[Resolution, ...]:
        self.before_resolve(step, group, queries, selection)
        return self.slots.resolve(step, group, queries, selection, **how)

    def before_resolve(self, step: Step, group: int, queries: range, selection: Array) -> None:
        """For subclasses that look at a selection, or change residency, before it is resolved."""
