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
    """A launched step: the host knows its requests and nothing of its tokens."""

    turns: tuple[Turn, ...]
    step: Step
    draft_count: int
    seconds: float
    warmth: StepWarmth

    def seen(self, verified: Sequence[tuple[int, int]]) -> Seen:
        assert len(verified) == len(self.turns), f"{len(verified)} outcomes of {len(self.turns)}"
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
    """PoolFull if there are no pages for the positions that the turns may reach: then nothing has
    changed."""
    assert turns, "a step without requests"
    assert len({turn.request for turn in turns}) == len(turns), "a request has two turns"
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
    for turn, target in zip(turns, targets, strict=True):
        assert 1 <= len(target) <= turn.count, f"{len(target)} tokens of {turn.count} queries"
    step.seal(accepted=[len(target) for target in targets])
    for turn, target, guesses in zip(turns, targets, drafts, strict=True):
        future.stash(turn.sequence.line, [target[-1], *guesses])
    outcomes = zip(feeds, choices, map(tuple, drafts), strict=True)
    future.tell(step.number, (Outcome(*each) for each in outcomes))
    return Flight(turns, step, draft_count, clock.now_s() - started_s, batch.warmth)


def _draft(
    runner: Runner, batch: Batch, forward: Forward, targets: Sequence[tuple[int, ...]], count: int
) -> list[list[int]]:
    """Drafts behind each feed's last target. Called before the step is sealed, for drafting makes
    the rows of the MTP layer."""
    if not runner.offload.layout.mtp_layer_count or count == 0:
        return [[] for _ in targets]
    firsts = batch.step.firsts
    following = [0] * batch.step.query_count
    for at, target in zip(firsts, targets, strict=True):
        following[at : at + len(target)] = target
    last = [at + len(target) - 1 for at, target in zip(firsts, targets, strict=True)]
    return draft(runner, batch, forward.hidden, following, last, count)
