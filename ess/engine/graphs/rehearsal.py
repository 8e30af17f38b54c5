"""Runs steps before there are requests, so that no request waits for the graph of a usual step.

There is a step for each vector of modes that a first step may run, with all drafts and with none;
how its request draws makes no difference. The largest bucket comes first: the other graphs then
work in its memory. A rehearsed step has one request; the rest of its bucket is pads.

Where ranks divide the experts, a rank without requests stands by with a graph of its own. So two
ranks decode each bucket in turn while all others stand by: the first rank captures its standing by
in the second rank's turn. When all kinds are captured, those with all drafts are captured once more
as timed steps. Kinds beyond the allowed number or bytes of graphs are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from ess.clock import Clock
from ess.engine.graphs.buckets import STEPS
from ess.engine.graphs.replays import Replays, StepForm
from ess.engine.plan import Turn
from ess.engine.ranks.agreement import StepNeeds
from ess.engine.requests.request import Request
from ess.engine.step.decode import Launcher
from ess.engine.step.laps import DeviceLap
from ess.engine.step.runner import Runner
from ess.engine.step.way import WholeModel
from ess.engine.tokens.sampling import Sampling
from ess.overlap.policy import Vector

TURNS: Final = (0, 1)
"""Ranks that decode so that the others stand by, in turn."""
TOLD_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`count` queries of each request, in a bucket of `counts`."""

    counts: tuple[int, ...]
    count: int
    vector: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The rehearsed steps run through the whole model here, even where the engine's own steps do
    not. Requests bring `width` queries with all their drafts. `ran` is called behind each kind."""

    launcher: Launcher
    replays: Replays
    width: int
    draft_count: int
    ran: Callable[[Rehearsal], None]

    @property
    def graph_max(self) -> int:
        """The most graphs that all parts may capture, where there are bytes for them."""
        runner, most = self.launcher.runner, self.replays.graph_max
        own = [kind.count for kind in kinds(runner, self.replays, self.width)]
        idle = len(self.replays.sizes) * (runner.model.expert_ranks is not None)
        return min(len(own) + own.count(self.width) + idle, most)

    def parts(self, rank: int | None) -> list[Callable[[], None]]:
        """The parts that this rank runs. Ranks that divide the experts all end a part before any
        begins the next."""
        turns = () if rank is None else TURNS
        decoding = [self._for_others if rank == turn else _none for turn in turns]
        return [self._own, *decoding, partial(self._own, is_timed=True)]

    def _own(self, *, is_timed: bool = False) -> None:
        """Captures the kinds of this rank's own steps."""
        for kind in kinds(self.launcher.runner, self.replays, self.width):
            if is_timed and kind.count < self.width:
                continue
            if not self.replays.is_full and self.replays.has_bytes(sum(kind.counts)):
                self._run(kind, 1 if is_timed else STEPS)

    def _for_others(self) -> None:
        """Decodes each bucket as often as the others need to capture their part of it."""
        for kind in one_of_each_bucket(self.launcher.runner, self.replays, self.width):
            self._run(kind, STEPS)

    def _run(self, kind: Kind, step_count: int) -> None:
        whole = replace(self.launcher, way=WholeModel())
        _run_steps(whole, kind, self.draft_count, step_count)
        self.ran(self)


class Progress:
    """Tells at most every few seconds how many graphs have been captured: a large model takes
    minutes for all of them."""

    def __init__(self, clock: Clock, tell: Callable[[str], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._began_s = self._told_s = clock.now_s()

    def __call__(self, rehearsal: Rehearsal) -> None:
        now_s = self._clock.now_s()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            made, seconds = rehearsal.replays.captured_count, now_s - self._began_s
            most = rehearsal.graph_max
            self._tell(f"graphs of steps: {made} of at most {most}, after {seconds:.0f} s")


def kinds(runner: Runner, replays: Replays, width: int) -> Iterator[Kind]:
    vectors, widths = runner.tuning.first_vectors(), dict.fromkeys((width, 1))
    for vector, count, size in product(vectors, widths, reversed(replays.sizes)):
        counts = replays.bucket((1,) * size, width)
        if counts and max(counts) >= count:
            yield Kind(counts=counts, count=count, vector=vector)


def one_of_each_bucket(runner: Runner, replays: Replays, width: int) -> list[Kind]:
    """A kind for each bucket. What other ranks do depends only on how many tokens are decoded."""
    first_of: dict[tuple[int, ...], Kind] = {}
    for kind in kinds(runner, replays, width):
        first_of.setdefault(kind.counts, kind)
    return list(first_of.values())


def _run_steps(launcher: Launcher, kind: Kind, draft_count: int, step_count: int) -> None:
    """Captures the kind in the step behind the steps that load its kernels; the graph with times is
    captured behind the graph without."""
    sampling = Sampling(tokens_max=STEPS * max(kind.counts))
    request = Request(number=0, prompt=[0], sampling=sampling)
    opened = launcher.runner.offload.open(request.prompt, length_max=request.length_max)
    request.sequence = opened
    line = opened.line
    launcher.future.stash(line, [0] * kind.count)
    for _ in range(step_count):
        flight = launcher.launch(
            (Turn(request, kind.count),),
            brought=StepNeeds(draft_count=draft_count),
            lap=DeviceLap(),
            fit=StepForm(kind.counts, kind.counts),
            vector=kind.vector,
        )
        launcher.learn(flight)
    launcher.future.forget(line)
    opened.close()


def _none() -> None:
    return
