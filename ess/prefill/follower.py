"""A stage behind the first: it obeys the frames of orders as they come, and passes them on.

A stage passes a frame on with its output for the micro-batch, as soon as its last layer is queued;
a frame without a micro-batch once it has obeyed it. Then it reports to the lead: what is free, how
long chunks took, which handoffs are over.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ess.comm.group import Group
from ess.comm.link import Link
from ess.prefill import orders, reports
from ess.prefill.orders import Order
from ess.prefill.reports import Hello, Report, Took
from ess.prefill.stage import Disagreement, Stage

BUSY_S: Final = 0.001
IDLE_S: Final = 0.1


class Follower:
    """Sends its Hello as soon as it is made."""

    def __init__(self, stage: Stage, group: Group, hello: Hello) -> None:
        assert group.previous is not None, "the first stage leads"
        self._stage = stage
        self._group = group
        self._previous: Link = group.previous
        self._reports: Link = group.reports[0]
        self._frame_count = 0
        self._unsent: bytes | None = None
        stage.between = self._between
        stage.leaves = self._pass_on
        self._report([hello])

    @property
    def is_stopped(self) -> bool:
        return self._stage.is_stopped

    def run(self) -> None:
        """Obeys until the lead orders it to stop; LinkLost if the group ends first."""
        while not self.is_stopped:
            self.turn(wait_s=BUSY_S if self._stage.is_busy else IDLE_S)

    def turn(self, *, wait_s: float = 0.0) -> bool:
        """Obeys a frame if one comes in time; returns whether it did."""
        self._between()
        frame = self._previous.receive(wait_s)
        if frame is not None:
            self._obey(frame.head, frame.tensor)
        if not self.is_stopped:
            self._report(self._stage.pump())
        return frame is not None

    def _obey(self, head: bytes, given: Tensor | None) -> None:
        self._unsent = head
        for order in orders.unpack(head):
            self._stage.obey(order, given if _runs(order) else None)
        self._frame_count += 1
        self._pass_on(None)
        took = Took(self._frame_count, self._stage.free())
        self._report([*self._stage.pump(), took])

    def _pass_on(self, hidden: Tensor | None) -> None:
        """The frame goes on once: a micro-batch ends it."""
        head, self._unsent = self._unsent, None
        if head is not None and self._group.next is not None:
            self._group.next.send(head, hidden)

    def _report(self, made: list[Report]) -> None:
        if made:
            self._reports.send(reports.pack(made))

    def _between(self) -> None:
        """Between layers and frames: gives a sign of life, and says which micro-batches have
        landed. LinkLost if the lead is gone."""
        self._group.advance()
        self._report(self._stage.ran())
        if self._reports.receive(0.0) is not None:
            raise Disagreement("the lead sent a report")

    def check(self) -> None:
        self._stage.check()


def _runs(order: Order) -> bool:
    return isinstance(order, orders.Run | orders.Profile)
