"""Orders of the first stage: its own part of the model obeys them, then the other stages get them.

So no order goes out that this stage cannot obey. A micro-batch goes out as soon as its last layer
here is queued: by then nothing in it can be refused any more.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ess.comm.group import Group
from ess.prefill.orders import Order
from ess.prefill.reports import Report
from ess.prefill.stage import Stage
from ess.prefill.stages import Stages


class Issuer:
    """`stage` is this rank's own, `stages` are all of them."""

    def __init__(self, stage: Stage, stages: Stages, group: Group) -> None:
        self.stage = stage
        self.stages = stages
        self._group = group
        self._unsent: Order | None = None
        stage.between = self._between
        stage.leaves = self._pass_on

    def order(self, order: Order) -> None:
        self._unsent = order
        self.stage.obey(order)
        if self._unsent is not None:
            self.stages.order(order)
        self.stages.obeyed()

    def _pass_on(self, hidden: Tensor) -> None:
        """The micro-batch that is being obeyed, with what was made of it here."""
        assert self._unsent is not None, "a state without an order"
        self.stages.order(self._unsent, hidden, is_obeyed=False)
        self._unsent = None
        self.stages.flush()

    def _between(self) -> None:
        """Takes reports between two layers; the lead acts on them after the step."""
        self._group.advance()
        self.stages.listen()

    def reports(self) -> Iterator[tuple[int, Report]]:
        """Moves handoffs on; yields the reports of all stages, this one's last."""
        self._between()
        yield from self.stages.heard()
        yield from ((0, report) for report in self.stage.pump())
