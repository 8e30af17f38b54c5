"""One decode step in device order: verify the drafts, guess the next ones, seal the rows.

All that this reads of the step before lies on the device. On a CPU a launch runs at once, in the
caller's thread; what it has said stays in the future map all the same until the host learns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ess.clock import Clock
from ess.door import Step
from ess.engine.plan import Turn
from ess.engine.step.drafts import draft
from ess.engine.step.feeding import Future
from ess.engine.step.runner import Runner
from ess.engine.step.warmth import SeenRows
from ess.engine.tpot_control import Seen


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step: the host knows its requests and nothing of its tokens."""

    turns: tuple[Turn, ...]
    step: Step
    draft_count: int
    seconds: float
    rows: SeenRows

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
    future: Future,
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
    fed = future.feed(step, turns)
    batch = runner.batch(step)
    forward = runner.decode(batch, fed.tokens)
    chosen = fed.choose(forward.logits)
    drafts = None
    if runner.offload.layout.mtp_layer_count and draft_count:
        # Before the step is sealed, for drafting makes the rows of the MTP layer.
        drafts = draft(runner, batch, forward.hidden, chosen.following, chosen.last, draft_count)
    step.seal(accepted=chosen.accepted)
    chosen.say(drafts)
    return Flight(turns, step, draft_count, clock.now_s() - started_s, batch.warmth.seen())
