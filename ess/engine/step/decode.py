"""One decode step in device order: verify the drafts, guess the next ones, seal the rows.

What the host decides and what it uploads comes first, then all that the device does between a
step's beginning and its seal, which may be a graph.

All that this reads of the step before lies on the device. On a CPU a launch runs at once, in the
caller's thread; its results stay in the future map all the same until the host learns the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ess.door import Step
from ess.engine.graphs.replays import DeviceResults, Replays, StepForm
from ess.engine.layers.batch import Course
from ess.engine.plan import Turn
from ess.engine.ranks.agreement import Ranks, StepNeeds
from ess.engine.step.feeding import Future, Outcome, StepInput
from ess.engine.step.half import half_tokens
from ess.engine.step.laps import Lap
from ess.engine.step.runner import Runner
from ess.engine.step.warmth import SeenRows
from ess.engine.step.way import Way
from ess.engine.tpot_control import SeenStep
from ess.overlap.policy import Vector


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: the host knows its requests and nothing of its tokens."""

    turns: tuple[Turn, ...]
    step: Step
    draft_count: int
    lap: Lap
    rows: SeenRows

    def seen(self, verified: Sequence[tuple[int, int]]) -> SeenStep:
        assert len(verified) == len(self.turns), f"{len(verified)} outcomes of {len(self.turns)}"
        return SeenStep(
            seconds=self.lap.seconds,
            request_count=len(self.turns),
            query_count=self.step.query_count,
            draft_count=self.draft_count,
            verified=verified,
        )


@dataclass(frozen=True, slots=True)
class Launcher:
    """Everything that all launches of an engine use. Without `replays` every step runs eagerly."""

    runner: Runner
    future: Future
    replays: Replays | None
    ranks: Ranks
    way: Way

    def launch(
        self,
        turns: tuple[Turn, ...],
        *,
        brought: StepNeeds,
        lap: Lap,
        fit: StepForm | None = None,
        vector: Vector | None = None,
    ) -> Flight:
        """PoolFull if there are no pages for the positions that the turns may reach: then nothing
        has changed. Then the ranks meet, and get what this rank has `brought` beside its turns.
        Without a `fit` into a graph's bucket the step runs eagerly. `vector` are its modes, if no
        policy decides them. `lap` has just begun."""
        assert turns, "a step without requests"
        runner = self.runner
        requests, query_counts = zip(*turns, strict=True)
        assert len(set(requests)) == len(turns), "a request has two turns"
        sequences = [request.sequence for request in requests]
        counts = query_counts if fit is None else fit.counts
        room = None if counts == query_counts else sum(counts)
        step = runner.offload.begin(sequences, query_counts=query_counts, room=room)
        fed = self.future.feed(step, turns, counts)
        course = runner.course(step, counts, vector)
        shape = counts if fit is None else fit.shape
        own = brought._replace(
            token_count=sum(shape), half_count=half_tokens(shape), splits=course.splits
        )
        agreement = self.ranks.meet(own)
        course, draft_count = runner.settled(course, splits=agreement.splits), agreement.draft_count
        compute = _computing(runner, self.way, step, course, fed, draft_count)
        if self.replays is None or fit is None:
            results = compute()
        else:
            kind = draft_count, agreement.sizes, fed.form
            results = self.replays.run(step, fit, course, kind, compute)
        step.seal(accepted=results.output.accepted[: len(turns)])
        lap.end()
        results.output.tell(fed)
        return Flight(turns, step, draft_count, lap, results.hits.seen())

    def learn(self, flight: Flight) -> tuple[Outcome, ...]:
        """The results of the oldest step; LinkLost if another rank's part of it may be missing."""
        outcomes = self.future.learn(flight.step.number)
        self.ranks.check()
        kept = [list(each.feed.tokens[: len(each.choice.tokens)]) for each in outcomes]
        flight.step.learn(accepted=[len(ids) for ids in kept], tokens=kept)
        return outcomes


def _computing(
    runner: Runner, way: Way, step: Step, course: Course, fed: StepInput, draft_count: int
) -> Callable[[], DeviceResults]:
    """What the device does for a step: nothing of it depends on a number that is not there yet."""

    def compute() -> DeviceResults:
        batch = runner.batch(step, course)
        return DeviceResults(way.decoded(runner, batch, fed, draft_count), batch.warmth)

    return compute
