"""The stages as the lead sees them: orders go down the pipeline, reports come from each stage.

Orders wait here while more than `FRAMES_AHEAD` frames are not yet obeyed by stage 1; so the lead
never waits in a send, and waiting orders go as one frame. A micro-batch with its tensor ends a
frame. Reports are taken between the lead's own layers and acted on between its steps.

Every obeyed frame comes back with what is free in the stage's pools; this must equal what was free
here after the same orders. A micro-batch leaves before this stage has obeyed it: stages that are
done with it earlier are compared when this one is. A stage that differs, is lost, or has orders and
makes no progress for the stage timeout ends the group: StageLost names it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import Tensor

from ess.comm.group import Group
from ess.comm.link import LinkLost
from ess.errors import EssError
from ess.prefill import orders, records, reports
from ess.prefill.orders import Order, Text
from ess.prefill.reports import Free, Hello, Report, Took

LOOK_S: Final = 0.5
FINISH_S: Final = 0.05
FRAMES_AHEAD: Final = 3


class StageLost(EssError):
    """The group has ended; the sentence names the stage and its layers."""


@dataclass(slots=True, eq=False)
class _Behind:
    """What was free here behind an order; None where that is unknown, or not known yet. `early` is
    what stages have said by then."""

    free: Free | None = None
    early: list[tuple[int, Took]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An order to be sent, and what was free behind it."""

    record: bytes
    hidden: Tensor | None
    behind: _Behind


class Stages:
    """`layers` are the main layers of each stage. The rank of a stage's first member is its number
    times the team's size; only first members are spoken to."""

    def __init__(
        self,
        group: Group,
        layers: Sequence[tuple[int, int]],
        *,
        timeout_s: float,
        free: Callable[[], Free],
    ) -> None:
        self.layers = tuple(layers)
        self._group = group
        self._timeout_s = timeout_s
        self._free = free
        self._team = group.size // len(layers)
        self._waiting: deque[_Waiting] = deque()
        self._expected: deque[tuple[int, _Behind]] = deque()
        self._newest = _Behind()
        self._sent_count = 0
        self._taken = [0] * len(layers)
        self._heard: deque[tuple[int, Report]] = deque()
        assert self._team * len(layers) == group.size, f"{group.size} ranks, {len(layers)} stages"

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def is_clear(self) -> bool:
        """Whether no order waits to be sent."""
        return not self._waiting

    @property
    def is_behind(self) -> bool:
        """Whether a micro-batch waits to be sent."""
        return any(order.hidden is not None for order in self._waiting)

    def name(self, stage: int) -> str:
        first, stop = self.layers[stage]
        return f"stage {stage} (layers {first}..{stop - 1})"

    def gather(
        self, own: Hello, timeout_s: float, *, rest: Callable[[], None] = lambda: None
    ) -> tuple[Hello, ...]:
        """Waits for the Hello of every stage; they must fit together. Calls `rest` meanwhile."""
        hellos = [own]
        for stage in range(1, self.count):
            frame = self._hello_of(stage, timeout_s, rest)
            reported = () if frame is None else reports.unpack(frame)
            if len(reported) != 1 or not isinstance(reported[0], Hello):
                raise StageLost(f"{self.name(stage)} has not come within {timeout_s:g} s")
            hellos.append(reported[0])
            self._check_fit(own, stage, reported[0])
        return tuple(hellos)

    def _hello_of(self, stage: int, timeout_s: float, rest: Callable[[], None]) -> bytes | None:
        left_s = timeout_s
        while (frame := self._receive(stage, min(left_s, LOOK_S))) is None and left_s > 0:
            left_s -= LOOK_S
            rest()
        return frame

    def _check_fit(self, own: Hello, stage: int, hello: Hello) -> None:
        first, stop = self.layers[stage]
        wanted = replace(own, first_layer=first, stop_layer=stop, metadata=hello.metadata)
        if hello != wanted:
            raise StageLost(
                f"{self.name(stage)} does not fit: it has layers {hello.first_layer}.."
                f"{hello.stop_layer - 1}, {hello.host_pages} host pages and {hello.index_pages} "
                f"index pages, the first stage {own.host_pages} and {own.index_pages}; all must "
                f"load the same model with the same settings, and where deterministic be of one "
                f"release and have the same instructions"
            )

    # ---- orders

    def order(self, order: Order, hidden: Tensor | None = None, *, is_obeyed: bool = True) -> None:
        """This stage has just obeyed the order, or will have when `obeyed` is called; the others
        get it with the next `flush`. After a Text nothing is known: its prompt is open here."""
        if self.count > 1:
            is_known = is_obeyed and not isinstance(order, Text)
            self._newest = _Behind(self._free() if is_known else None)
            self._waiting.append(_Waiting(orders.pack(order), hidden, self._newest))

    def obeyed(self) -> None:
        """This stage has obeyed the order that was given last."""
        if self.count > 1:
            self._newest.free = self._free()
            for stage, took in self._newest.early:
                self._compare(stage, took, self._newest.free)

    def flush(self) -> None:
        while self._waiting and self._sent_count - self._taken[1] < FRAMES_AHEAD:
            size, frame = len(records.MAGIC), []
            while self._waiting and size + len(self._waiting[0].record) <= records.HEAD_BYTES_MAX:
                frame.append(self._waiting.popleft())
                size += len(frame[-1].record)
                if frame[-1].hidden is not None:
                    break
            self._send(frame)

    def _send(self, frame: Sequence[_Waiting]) -> None:
        assert frame, "an order is larger than a frame"
        link = self._group.next
        assert link is not None, "the last stage sends nothing on"
        self._sent_count += 1
        self._expected.append((self._sent_count, frame[-1].behind))
        try:
            link.send(records.head(order.record for order in frame), frame[-1].hidden)
        except LinkLost as error:
            raise self._stage_lost(error) from None

    # ---- reports

    def listen(self, *, wait_s: float = 0.0) -> None:
        """Takes reports without acting on them; StageLost if a stage is gone. With `wait_s`, waits
        for the last stage."""
        for stage in reversed(range(1, self.count)):
            while (content := self._receive(stage, wait_s)) is not None:
                self._take(stage, content)
                wait_s = 0.0
            wait_s = 0.0
        self._check_progress()

    def _take(self, stage: int, content: bytes) -> None:
        for report in reports.unpack(content):
            if isinstance(report, Took):
                self._on_took(stage, report)
            else:
                self._heard.append((stage, report))

    def heard(self) -> Iterator[tuple[int, Report]]:
        """Yields (stage, report) for the reports taken since the last call."""
        while self._heard:
            yield self._heard.popleft()

    def _receive(self, stage: int, timeout_s: float) -> bytes | None:
        try:
            frame = self._group.reports[stage * self._team].receive(timeout_s)
        except LinkLost as error:
            raise self._stage_lost(error) from None
        return None if frame is None else frame.head

    def finish(self) -> None:
        """Waits until every stage has obeyed every order. A stage may leave after its last."""
        while behind := self._behind():
            self._group.advance()
            self.flush()
            for stage in behind:
                content = self._receive(stage, FINISH_S)
                if content is not None:
                    self._take(stage, content)
            self._check_progress()

    def _behind(self) -> list[int]:
        stages = range(1, self.count)
        return [s for s in stages if self._taken[s] < self._sent_count or not self.is_clear]

    def _on_took(self, stage: int, took: Took) -> None:
        """Stage s has obeyed its next frame: frames are obeyed in order."""
        self._taken[stage] += 1
        frame = self._taken[stage]
        if took.frame != frame or frame > self._sent_count:
            raise StageLost(
                f"{self.name(stage)} has obeyed frame {took.frame}, where {frame} is next of "
                f"{self._sent_count} sent"
            )
        first, _ = self._expected[0]
        behind = self._expected[frame - first][1]
        if behind.free is None:
            behind.early.append((stage, took))
        else:
            self._compare(stage, took, behind.free)
        while self._expected and self._expected[0][0] <= min(self._taken[1:]):
            self._expected.popleft()

    def _compare(self, stage: int, took: Took, free: Free) -> None:
        if took.free != free:
            raise StageLost(
                f"{self.name(stage)} disagrees: behind frame {took.frame} it has {took.free}, "
                f"{self.name(0)} {free}"
            )

    def _check_progress(self) -> None:
        """StageLost for a rank with orders that makes no progress; links report silence and
        loss."""
        for rank, beat in self._group.beats().items():
            stage = rank // self._team
            is_busy = stage > 0 and self._taken[stage] < self._sent_count
            if is_busy and beat.still_s > self._timeout_s:
                raise StageLost(
                    f"{self.name(stage)} has orders and stands still for {beat.still_s:.1f} s, "
                    f"at most {self._timeout_s:g}"
                )

    def silences(self) -> tuple[float, ...]:
        """Seconds since each stage's last sign of life."""
        beats = self._group.beats()
        return (0.0, *(beats[stage * self._team].silent_s for stage in range(1, self.count)))

    def _stage_lost(self, error: LinkLost) -> StageLost:
        return StageLost(f"{self.name(max(error.rank, 0) // self._team)}: {error}")

    def check(self) -> None:
        assert all(0 <= taken <= self._sent_count for taken in self._taken), f"{self._taken}"
        assert len(self._expected) == self._sent_count - min(self._taken[1:], default=0), "a frame"


def members(hellos: Sequence[Hello], layer_total: int) -> list[tuple[bytes, range]]:
    """Each stage's sealed Hello and layers, for other workers; the last has the MTP layers."""
    stops = [*(hello.stop_layer for hello in hellos[:-1]), layer_total]
    return [
        (hello.metadata, range(hello.first_layer, stop))
        for hello, stop in zip(hellos, stops, strict=True)
    ]
