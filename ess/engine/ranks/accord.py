"""What the ranks of a company agree on at the head of each step, and what follows from it.

Each rank has its own requests, pools and schedules. Of a step the ranks share the exchanges of the
layers with experts, so all must know which of them there will be:

    decode   the layers with experts in order, if any rank has a decode batch: each exchanged once,
             or twice in turn where the step `splits`
    drafts   so many times the MTP module's layer
    prompts  the layers with experts, and the MTP module's, if any rank has a prompt chunk

Each rank says what it brings, hears what all bring, and derives the accord by the same function of
the same table: that is why they agree, with a single round. The step's halves are those of the rank
with the most tokens, which the others wait for in any case; a rank that has fewer than two requests
has an empty half. Drafts are as many as every rank that decodes can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Final, Protocol

import torch

from ess.comm.company import Company, OutOfStep
from ess.comm.experts.balance import balance
from ess.comm.experts.loads import WINDOW_STEPS
from ess.engine.process.messages import ExpertLine

TICK_S: Final = 0.01
"""How long a rank waits for requests of its own, while no rank has any, before it asks again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rank brings: tokens that it decodes, and of prompts; drafts per request that it can
    afford; whether its batch should run in two halves; whether it wants to end."""

    token_count: int = 0
    chunk_tokens: int = 0
    draft_count: int = 0
    splits: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Accord:
    """`token_max` is the largest decode batch of any rank; 0: nobody decodes."""

    token_max: int
    draft_count: int
    splits: bool
    has_chunks: bool
    all_leave: bool

    @property
    def decodes(self) -> bool:
        return self.token_max > 0

    @property
    def is_quiet(self) -> bool:
        return not self.decodes and not self.has_chunks


def agreed(wishes: Sequence[Wish]) -> Accord:
    """
    >>> agreed([Wish(token_count=3, draft_count=2, splits=True), Wish(chunk_tokens=64)])
    Accord(token_max=3, draft_count=2, splits=True, has_chunks=True, all_leave=False)
    """
    decoding = [wish for wish in wishes if wish.token_count]
    largest = max(decoding, key=lambda wish: wish.token_count, default=Wish())
    return Accord(
        token_max=largest.token_count,
        draft_count=min((wish.draft_count for wish in decoding), default=0),
        splits=largest.splits,
        has_chunks=any(wish.chunk_tokens for wish in wishes),
        all_leave=all(wish.leaves for wish in wishes),
    )


class Ranks(Protocol):
    """`latest` is what was agreed last."""

    latest: Accord

    @property
    def rest_s(self) -> float:
        """How long this rank may wait for requests before it meets the others again."""

    def meet(self, wish: Wish) -> Accord: ...

    def line(self) -> ExpertLine | None:
        """None where all experts are here."""


class Alone:
    """An engine whose experts are all here: it may leave whenever it wants to."""

    rest_s = float("inf")

    def __init__(self) -> None:
        self.latest = agreed([Wish(leaves=True)])

    def meet(self, wish: Wish) -> Accord:
        decodes = wish.token_count > 0
        self.latest = Accord(
            token_max=wish.token_count,
            draft_count=wish.draft_count if decodes else 0,
            splits=wish.splits and decodes,
            has_chunks=wish.chunk_tokens > 0,
            all_leave=True,
        )
        return self.latest

    def line(self) -> None:
        return None


class Many:
    """Every rank meets the others once a step, whether it has requests or not. `on_census` is
    called when the ranks have told one another how often each expert was chosen."""

    def __init__(
        self,
        company: Company,
        *,
        on_meet: Callable[[], None],
        on_census: Callable[[], None] = lambda: None,
    ) -> None:
        self.latest = agreed([Wish()])
        self._company = company
        self._on_meet = on_meet
        self._on_census = on_census
        self._step = self._busy_count = 0
        self._line: ExpertLine | None = None

    @property
    def rest_s(self) -> float:
        return TICK_S if self.latest.is_quiet else 0.0

    def meet(self, wish: Wish) -> Accord:
        """LinkLost if a rank is lost."""
        words = torch.tensor([self._step, *map(int, astuple(wish))])
        size, team = len(words), self._company.team
        table = team.all_gather(words, sizes=[size] * team.size).view(team.size, size).tolist()
        for rank, (step, *_) in enumerate(table):
            if step != self._step:
                raise OutOfStep(f"rank {rank} is at step {step}, rank {team.rank} at {self._step}")
        self._company.enter(self._step)
        self._step += 1
        self._on_meet()
        self.latest = agreed([_wish(*said) for _, *said in table])
        self._census()
        return self.latest

    def _census(self) -> None:
        """All ranks count steps alike, quiet ones not; what the last ones chose is told too."""
        if self._busy_count == WINDOW_STEPS or (self.latest.all_leave and self._busy_count):
            self._company.loads.share(self._company.team, self._busy_count)
            self._busy_count = 0
            self._line = expert_line(self._company)
            self._on_census()
        self._busy_count += not self.latest.is_quiet

    def line(self) -> ExpertLine | None:
        """As of the last census."""
        return self._line


def expert_line(company: Company) -> ExpertLine:
    recent = company.loads.recent()
    each = [balance(company.places.of(layer).places, loads) for layer, loads in recent.items()]
    return ExpertLine(
        step_count=company.loads.step_count,
        chosen_count=sum(map(sum, recent.values())),
        balance=sum(each) / max(len(each), 1),
    )


def _wish(token_count: int, chunk_tokens: int, draft_count: int, splits: int, leaves: int) -> Wish:
    return Wish(token_count, chunk_tokens, draft_count, bool(splits), bool(leaves))
