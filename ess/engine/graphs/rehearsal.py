"""Runs steps before there are requests, so that no request waits for the graph of a usual step.

There is a step for each way to draw and each vector of modes that a first step may run, with all
drafts and with none. The largest bucket comes first: the other graphs then work in its memory. A
rehearsed step has one request; the rest of its bucket is pads. When all kinds are captured, each is
captured once more as a timed step. Kinds beyond the allowed number or bytes of graphs are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from ess.clock import Clock
from ess.engine.graphs.replays import EAGER_STEPS, Fit, Replays
from ess.engine.plan import Turn
from ess.engine.ranks.agreement import StepNeeds
from ess.engine.requests.request import Request
from ess.engine.step.decode import Launcher
from ess.engine.step.laps import DeviceLap
from ess.engine.step.runner import Runner
from ess.engine.step.way import WholeModel
from ess.engine.tokens.sampling import Sampling
from ess.overlap.policy import Vector
from ess.units import counted, format_bytes

TEMPERATURES: Final = (1.0, 0.0)
"""The default of a request, and greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`count` queries of each request, in a bucket of `counts`."""

    counts: tuple[int, ...]
    count: int
    vector: Vector
    sampling: Sampling
    is_timed: bool


def rehearse(
    launcher: Launcher,
    replays: Replays,
    *,
    width: int,
    draft_count: int,
    clock: Clock,
    tell: Callable[[str], None],
) -> None:
    """The rehearsed steps run through the whole model here, whatever way the engine's steps go."""
    started_s, runner = clock.now_s(), launcher.runner
    rehearsing = replace(launcher, way=WholeModel())
    tell(f"graphs of steps: up to {counted(max(replays.sizes, default=0), 'request')} a step")
    with runner.tuning.uncounted(), runner.verifier.off():
        for kind in kinds(runner, replays, width):
            if not replays.is_full and replays.has_bytes(sum(kind.counts)):
                _capture(rehearsing, kind, draft_count)
    replays.rehearsed()
    runner.offload.drain()
    made, size = replays.captured_count, format_bytes(replays.byte_count)
    tell(f"graphs of steps: {made} captured in {clock.now_s() - started_s:.1f} s, {size}")


def kinds(runner: Runner, replays: Replays, width: int) -> Iterator[Kind]:
    vectors, widths = runner.tuning.first_vectors(), dict.fromkeys((width, 1))
    for is_timed, temperature, vector, count, size in product(
        (False, True), TEMPERATURES, vectors, widths, reversed(replays.sizes)
    ):
        counts = replays.bucket((1,) * size, width)
        if counts and max(counts) >= count:
            yield Kind(
                counts=counts,
                count=count,
                vector=vector,
                sampling=Sampling(temperature=temperature, tokens_max=(1 + EAGER_STEPS) * width),
                is_timed=is_timed,
            )


def _capture(launcher: Launcher, kind: Kind, draft_count: int) -> None:
    """Captures the kind in the step behind the steps that load its kernels; the graph with times is
    captured behind the graph without."""
    request = Request(number=0, prompt=[0], sampling=kind.sampling)
    opened = launcher.runner.offload.open(request.prompt, length_max=request.length_max)
    request.sequence = opened
    line = opened.line
    launcher.future.stash(line, [0] * kind.count)
    for _ in range(1 if kind.is_timed else 1 + EAGER_STEPS):
        flight = launcher.launch(
            (Turn(request, kind.count),),
            brought=StepNeeds(draft_count=draft_count),
            lap=DeviceLap(),
            fit=Fit(kind.counts, kind.counts),
            vector=kind.vector,
        )
        launcher.learn(flight)
    launcher.future.forget(line)
    opened.close()
