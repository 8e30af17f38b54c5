"""The agreement of ranks that divide the experts, at the head of each step.

Each rank has its own requests, pools and schedules. The ranks share the exchanges of the layers
with experts, so all must know which exchanges a step will have:

    decode   the layers with experts in order, if any rank has a decode batch: each exchanged once,
             or twice in turn where the step `splits`
    drafts   the MTP module's layer, once for each draft
    prompts  the layers with experts, and the MTP module's, if any rank has a prompt chunk

On a device all must also know how large they are: as the largest batch, half and chunk of any rank.

Each rank sends what it needs and gets what all ranks need. All derive the agreement by the same
function of the same table, so one round is enough. The step's halves are those of the rank with the
most tokens, which the others wait for in any case; a rank that has fewer than two requests has an
empty half. Drafts are as many as every rank that decodes can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch

from ess.comm.experts.balance import balance
from ess.comm.experts.expert_ranks import ExpertRanks, OutOfStep, Rooms
from ess.comm.experts.loads import WINDOW_STEPS
from ess.engine.process.messages import ExpertLine
from ess.engine.tpot_control import Limits

TICK_S: Final = 0.01
"""How long a rank waits for requests of its own, while no rank has any, before it asks again."""


class StepNeeds(NamedTuple):
    """What a rank brings: tokens that it decodes, those of the larger half of its batch, and those
    of prompts; drafts per request that it can afford; whether its batch should run in two halves;
    whether it wants to end."""

    token_count: int = 0
    half_count: int = 0
    chunk_tokens: int = 0
    draft_count: int = 0
    splits: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class StepAgreement:
    """`rooms` has the largest decode batch of any rank, 0 where no rank decodes, the largest half
    and the largest chunk."""

    rooms: Rooms
    draft_count: int
    splits: bool
    all_leave: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """How large the exchanges of what decodes are: a graph holds them."""
        return self.rooms.batch, self.rooms.half if self.splits else 0

    @property
    def decodes(self) -> bool:
        return self.rooms.batch > 0

    @property
    def has_chunks(self) -> bool:
        return self.rooms.chunk > 0

    @property
    def is_quiet(self) -> bool:
        return not self.decodes and not self.has_chunks


def agreed(needs: Sequence[StepNeeds]) -> StepAgreement:
    """
    >>> agreed([StepNeeds(token_count=3, draft_count=2), StepNeeds(chunk_tokens=64)]).rooms
    Rooms(batch=3, half=0, chunk=64)
    """
    decoding = [need for need in needs if need.token_count]
    largest = max(decoding, key=lambda need: need.token_count, default=StepNeeds())
    return StepAgreement(
        rooms=Rooms(
            batch=largest.token_count,
            half=max((need.half_count for need in needs), default=0),
            chunk=max((need.chunk_tokens for need in needs), default=0),
        ),
        draft_count=min((need.draft_count for need in decoding), default=0),
        splits=largest.splits,
        all_leave=all(need.leaves for need in needs),
    )


class Ranks(Protocol):
    """`latest` is what was agreed last. `counts`: the choices of experts are those of requests."""

    latest: StepAgreement
    counts: bool

    @property
    def rest_s(self) -> float:
        """How long this rank may wait for requests before it meets the others again."""

    def meet(self, need: StepNeeds) -> StepAgreement: ...

    def limits(self, mine: Limits) -> Limits:
        """What bounds a step here, where this rank's pace gives `mine`."""

    def check(self) -> None:
        """LinkLost if a rank is lost: asked when the host has waited for a device, before what came
        from there is believed."""

    def line(self) -> ExpertLine | None:
        """None where all experts are here."""


class Alone:
    """An engine whose experts are all here: it may leave whenever it wants to."""

    rest_s = float("inf")

    def __init__(self) -> None:
        self.latest = agreed([StepNeeds(leaves=True)])
        self.counts = True

    def meet(self, need: StepNeeds) -> StepAgreement:
        decodes = need.token_count > 0
        self.latest = StepAgreement(
            rooms=Rooms(need.token_count, need.half_count, need.chunk_tokens),
            draft_count=need.draft_count if decodes else 0,
            splits=need.splits and decodes,
            all_leave=True,
        )
        return self.latest

    def limits(self, mine: Limits) -> Limits:
        return mine

    def check(self) -> None:
        return

    def line(self) -> None:
        return None


class Many:
    """Every rank meets the others once in each step, even without requests. `on_census` is called
    when all ranks know how often each expert was chosen."""

    def __init__(
        self,
        expert_ranks: ExpertRanks,
        *,
        on_meet: Callable[[], None],
        on_census: Callable[[], None] = lambda: None,
    ) -> None:
        self.latest = agreed([StepNeeds()])
        self.counts = True
        self._expert_ranks = expert_ranks
        self._on_meet = on_meet
        self._on_census = on_census
        self._step = self._busy_count = 0
        self._line: ExpertLine | None = None

    @property
    def rest_s(self) -> float:
        return TICK_S if self.latest.is_quiet else 0.0

    def meet(self, need: StepNeeds) -> StepAgreement:
        """LinkLost if a rank is lost."""
        words = torch.tensor([self._step, *map(int, need)])
        size, team = len(words), self._expert_ranks.team
        table = team.all_gather(words, sizes=[size] * team.size).view(team.size, size).tolist()
        for rank, (step, *_) in enumerate(table):
            if step != self._step:
                raise OutOfStep(f"rank {rank} is at step {step}, rank {team.rank} at {self._step}")
        self.latest = agreed([_needs(*numbers) for _, *numbers in table])
        self._expert_ranks.enter(self._step, self.latest.rooms)
        self._step += 1
        self._on_meet()
        if self.counts:
            self._census()
        else:
            self._expert_ranks.loads.forget()
        return self.latest

    def limits(self, mine: Limits) -> Limits:
        return mine

    def check(self) -> None:
        self._expert_ranks.team.check()

    def _census(self) -> None:
        """All ranks count steps in the same way and leave out steps without requests. The choices
        of the last steps, before all ranks leave, are shared too."""
        is_last = self.latest.all_leave and self._busy_count > 0
        if self._busy_count == WINDOW_STEPS or is_last:
            loads, team = self._expert_ranks.loads, self._expert_ranks.team
            loads.share(team, self._busy_count, is_last=self.latest.all_leave)
            self._busy_count = 0
            self._line = expert_line(self._expert_ranks)
            self._on_census()
        self._busy_count += not self.latest.is_quiet

    def line(self) -> ExpertLine | None:
        """The line of the last census."""
        return self._line


def expert_line(expert_ranks: ExpertRanks) -> ExpertLine:
    recent = expert_ranks.loads.recent()
    each = [balance(expert_ranks.places.of(layer).places, loads) for layer, loads in recent.items()]
    return ExpertLine(
        step_count=expert_ranks.loads.step_count,
        chosen_count=sum(map(sum, recent.values())),
        balance=sum(each) / max(len(each), 1),
    )


def _needs(
    token_count: int,
    half_count: int,
    chunk_tokens: int,
    draft_count: int,
    splits: int,
    leaves: int,
) -> StepNeeds:
    return StepNeeds(token_count, half_count, chunk_tokens, draft_count, bool(splits), bool(leaves))
