"""How a step goes through the ranks of a mesh: from stage to stage, and its tokens to all.

A stage makes the rows of its own layers and hands the hidden states on. The last stage has the head
and the MTP module: it chooses tokens, drafts, and sends both to all ranks. So every rank knows the
step's tokens before it seals its own rows. A selection is not handed on: layers that share one are
of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

import msgspec
from torch import Tensor

from ess.comm.experts.expert_ranks import OutOfStep
from ess.comm.link import next_frame
from ess.engine.layers.batch import Batch
from ess.engine.layers.heads import AllHeads, Heads
from ess.engine.mesh.grammars import restrict
from ess.engine.mesh.lockstep import Lockstep
from ess.engine.mesh.team_heads import AllMake, TeamHeads
from ess.engine.mesh.words import RequestTokens, StepTokens, packed, unpacked
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import Hooks, Prefilled, run_part
from ess.engine.step.feeding import StepInput
from ess.engine.step.runner import Runner
from ess.engine.step.underway.future import HostChosen, HostInput, HostOutput
from ess.engine.step.way import drafted
from ess.engine.tokens.verification import Choice


class Relay:
    """`Way`, of one rank."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._group = lockstep.group
        team = self._group.team
        self._share = AllMake(lockstep.latent)
        self.heads: Heads = AllHeads()
        if team.size > 1:
            self._share = self.heads = TeamHeads(team, lockstep.latent)

    # ---- decode

    def decoded(self, runner: Runner, batch: Batch, fed: StepInput, draft_count: int) -> HostOutput:
        assert isinstance(fed, HostInput), "a mesh has its tokens on the host"
        fed_digest = digest(fed)
        restrict(self._lockstep, fed)
        hidden = self._given(batch.step.query_count)
        if hidden is None:
            hidden = runner.model.embed(fed.tokens)
        outgoing = runner.through(batch, hidden)
        self._hand_on(outgoing)
        agreed = self._lockstep.tell(
            lambda: self._told(runner, batch, fed, outgoing, draft_count),
            is_last=runner.model.is_last,
            fed=fed_digest,
        )
        choices = [Choice(each.tokens, each.chances, each.is_broken) for each in agreed.made]
        return HostOutput(choices, [each.drafts for each in agreed.made])

    def _told(
        self, runner: Runner, batch: Batch, fed: HostInput, hidden: Tensor, draft_count: int
    ) -> StepTokens:
        """The choice and drafts of the team's first member are used: another member's logits may
        round otherwise."""
        forward = runner.ended(batch, hidden)
        chosen = fed.choose(forward.logits)
        mine = tuple(_made(choice) for choice in chosen.choices)
        choices = self._of_first(StepTokens(digest(fed), mine)).made
        kept = [Choice(each.tokens, each.chances, each.is_broken) for each in choices]
        drafts = drafted(runner, batch, forward, HostChosen(fed, kept), draft_count)
        if drafts is None:
            return StepTokens(digest(fed), choices)
        guesses: list[list[int]] = drafts.tolist()
        made = tuple(
            msgspec.structs.replace(each, drafts=tuple(guess))
            for each, guess in zip(choices, guesses, strict=True)
        )
        return self._of_first(StepTokens(digest(fed), made))

    def _of_first(self, mine: StepTokens) -> StepTokens:
        choices = unpacked(self._group.team.broadcast(packed(mine)))
        assert isinstance(choices, StepTokens), f"{type(choices).__name__} in the place of choices"
        return choices

    # ---- prompts

    def prefilled(
        self, runner: Runner, spans: Sequence[Span], on_layer: Callable[[int], None] | None
    ) -> list[Prefilled]:
        given = self._given(sum(len(span.tokens) for span in spans))
        made, hidden = run_part(
            runner, spans, given=given, share=self._share, hooks=Hooks(on_layer=on_layer)
        )
        self._hand_on(hidden)
        return made

    # ---- between stages

    def _given(self, count: int) -> Tensor | None:
        if self._group.previous is None:
            return None
        frame = next_frame(self._group.previous)
        if frame.tensor is None or len(frame.tensor) != count:
            got = 0 if frame.tensor is None else len(frame.tensor)
            raise OutOfStep(f"rank {self._group.rank} runs {count} tokens, and {got} came")
        return frame.tensor

    def _hand_on(self, hidden: Tensor) -> None:
        if self._group.next is not None:
            self._group.next.send(b"", hidden.contiguous())


def digest(fed: HostInput) -> int:
    """A checksum of what a step is fed with."""
    numbers = [(feed.request.number, feed.position, *feed.tokens) for feed in fed.feeds]
    return crc32(msgspec.msgpack.encode(numbers))


def _made(choice: Choice) -> RequestTokens:
    return RequestTokens(choice.tokens, choice.chances, choice.is_broken)
