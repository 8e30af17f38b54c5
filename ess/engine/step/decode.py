"""One decode step in device order: verify the drafts, guess the next ones, seal the rows.

All that this reads of the step before lies on the device. On a CPU a launch runs at once, in the
caller's thread; what it has said stays in the future map all the same until the host learns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ess.clock import Clock
from ess.door import Step
from ess.engine.layers.batch import Batch
from ess.engine.plan import Feed, Turn
from ess.engine.step.drafts import draft
from ess.engine.step.future import FutureMap, Outcome
from ess.engine.step.runner import Forward, Runner
from ess.engine.step.warmth import StepWarmth
from ess.engine.tokens.verification import choose_all
from ess.engine.tpot_control import Seen


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: the host knows who is in it and nothing of what comes of it."""

    turns: tuple[Turn, ...]
    step: Step
    draft_count: int
    seconds: float
    warmth: StepWarmth

    def seen(self, verified: Sequence[tuple[int, int]]) -> Seen:
        return Seen(
            seconds=self.seconds,
            request_count=len(self.turns),
            query_count=self.step.query_count,
            draft_count=self.draft_count,
            verified=verified,
        )


def launch(
    runner: Runner,
    future: FutureMap,
    turns: tuple[Turn, ...],
    *,
    draft_count: int,
    clock: Clock,
) -> Flight:
    """PoolFull if the pages for the turns' bounds do not fit: then nothing has changed."""
    started_s = clock.now_s()
    sequences = [turn.sequence for turn in turns]
    step = runner.offload.begin(sequences, query_counts=[turn.count for turn in turns])
    firsts = step.firsts
    feeds = [
        Feed(turn.request, future.take(turn.sequence.line, turn.count), int(step.query_start[at]))
        for turn, at in zip(turns, firsts, strict=True)
    ]
    batch = runner.batch(step)
    forward = runner.decode(batch, [token for feed in feeds for token in feed.tokens])
    choices = choose_all(feeds, forward.logits)
    targets = [choice.tokens for choice in choices]
    drafts = _draft(runner, batch, forward, targets, draft_count)
    step.seal(accepted=[len(target) for target in targets])
    for turn, target, guesses in zip(turns, targets, drafts, strict=True):
        future.stash(turn.sequence.line, [target[-1], *guesses])
    outcomes = zip(feeds, choices, map(tuple, drafts), strict=True)
    future.tell(step.number, (Outcome(*each) for each in outcomes))
    return Flight(turns, step, draft_count, clock.now_s() - started_s, batch.warmth)


def _draft(
    runner: Runner, batch: Batch, forward: Forward, targets: Sequence[tuple[int, ...]], count: int
) -> list[list[int]]:
    """Behind each feed's last target; before the seal, for drafting makes the MTP layer's rows."""
    if not runner.offload.layout.mtp_layer_count or count == 0:
        return [[] for _ in targets]
    firsts = batch.step.firsts
    following = [0] * batch.step.query_count
    for at, target in zip(firsts, targets, strict=True):
        following[at : at + len(target)] = target
    last = [at + len(target) - 1 for at, target in zip(firsts, targets, strict=True)]
    return draft(runner, batch, forward.hidden, following, last, count)
