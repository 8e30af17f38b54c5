"""A stage that records the time of each layer of each micro-batch."""

from __future__ import annotations

import itertools
import time
from io import FileIO

import msgspec
from torch import Tensor

from ess.clock import RealClock
from ess.engine.step.runner import Runner
from ess.prefill.orders import Order, Run
from ess.prefill.stage import Stage
from ess.prefill.trial.pipe_messages import Line, Timed


class TimedStage(Stage):
    """Call `follow` once its `between` is set: it reads the clocks between layers."""

    def __init__(self, runner: Runner, log: FileIO) -> None:
        super().__init__(runner, port=None, clock=RealClock())
        self._log = log
        self._marks: list[tuple[float, float]] = []
        self._away = (0.0, 0.0)

    def follow(self) -> None:
        before, leaves = self.between, self.leaves

        def between() -> None:
            self._mark()
            before()

        def leaving(hidden: Tensor) -> None:
            wall_s, core_s = _now()
            leaves(hidden)
            after = _now()
            self._away = (after[0] - wall_s, after[1] - core_s)

        self.between, self.leaves = between, leaving

    def _mark(self) -> None:
        """The time of sending a state belongs to no layer."""
        wall_s, core_s = _now()
        self._marks.append((wall_s - self._away[0], core_s - self._away[1]))

    def obey(self, order: Order, hidden: Tensor | None = None) -> None:
        if not isinstance(order, Run):
            super().obey(order, hidden)
            return
        self._away = (0.0, 0.0)
        self._marks.clear()
        self._mark()
        super().obey(order, hidden)
        self._mark()
        walls, cores = zip(*self._marks, strict=True)
        self.write(
            Timed(
                chunks=[(part.start, part.stop) for part in order.parts],
                wall_s=_steps(walls),
                core_s=_steps(cores),
            )
        )

    def write(self, line: Line) -> None:
        self._log.write(msgspec.json.encode(line) + b"\n")


def _now() -> tuple[float, float]:
    return time.monotonic(), time.thread_time()


def _steps(times: tuple[float, ...]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
