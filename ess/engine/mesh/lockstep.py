"""How the ranks of a mesh stay one engine: rank 0 says what happens, and the others do the same.

Every rank runs the same engine: scheduler, requests, pages, reservations. What such an engine does
follows from the calls that it receives, in their order, and from the tokens of each step. Rank 0
passes on both, and nothing else decides:

    clock        only rank 0's pace is followed: it says how large a step may be
    copies       a question whether a copy has landed waits until it has (`flashtrans.patient`)
    slots        budgets of the arenas do not move, so what can be admitted stays equal
    two halves   rank 0 says whether a step splits
    grammars     rank 0 says which are compiled, and which tokens they allow (`mesh.grammars`)
    disks        a page counts where all stages have read it (`door.memory.shelf`)
    modes        each rank's own: they change when rows are copied, and no page and no token

Ranks that differ are noticed before they serve a wrong token. At the head of each step every rank
compares with rank 0 what the step has, what is free in its pools and which pages were taken, and
behind it what the tokens were made from. The first difference ends the group, with an error that
names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ess.comm.experts.expert_ranks import OutOfStep
from ess.comm.group import Group
from ess.comm.link import Link
from ess.door import Offload
from ess.door.memory.shelf import Shelf
from ess.engine.mesh.words import (
    Aside,
    Call,
    Counts,
    Holds,
    Met,
    Stepped,
    StepTokens,
    Word,
    receive,
    send,
)
from ess.engine.ranks.agreement import StepAgreement, StepNeeds, agreed
from ess.engine.tpot_control import Limits
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.pool.latent import LatentPool

W = TypeVar("W", bound=Aside)


class Lockstep:
    """`Ranks`, for an engine that is one of a mesh."""

    rest_s = float("inf")

    def __init__(self, group: Group, offload: Offload) -> None:
        self.latest = agreed([StepNeeds(leaves=True)])
        self.counts = True
        self.group = group
        self._offload = offload
        self._step = 0
        self._limits: Limits | None = None

    @property
    def stage_count(self) -> int:
        return self.group.size // self.group.team.size

    @property
    def stage(self) -> int:
        return self.group.rank // self.group.team.size

    @property
    def is_lead(self) -> bool:
        return self.group.rank == 0

    @property
    def latent(self) -> LatentPool:
        return self._offload.owner.pools.latent

    def check(self) -> None:
        return

    def line(self) -> None:
        """Each process has all experts of its layers."""

    def agree(self) -> None:
        """No rank admits more than the smallest pools hold: once, before the first call."""
        ledger = self._offload.owner.pools.ledger
        mine = Holds(ledger.capacities())
        if all_hold := self._gathered(mine, Holds):
            mine = _least([holds.capacities for holds in all_hold])
        ledger.limit(self.from_lead(mine, Holds).capacities)
        if self._shelf is not None:
            self._shelf.agree = self.least

    def least(self, counts: list[int]) -> list[int]:
        """The least that a rank has of each count. It returns when all ranks have called it."""
        mine = Counts(counts)
        if told := self._gathered(mine, Counts):
            lengths = {len(each.counts) for each in told}
            if len(lengths) > 1:
                raise self._apart(f"the ranks load {sorted(lengths)} prompts")
            mine = Counts([min(each) for each in zip(*(each.counts for each in told), strict=True)])
        return self.from_lead(mine, Counts).counts

    def _gathered(self, mine: W, kind: type[W]) -> list[W]:
        """On rank 0 the words of all ranks; the others send theirs."""
        if self.is_lead:
            return [mine, *(self._as(receive(link), kind) for link in self._others)]
        send([self._to_lead], mine)
        return []

    # ---- calls

    def say(self, call: Call) -> None:
        """On rank 0: tells the others what its engine is about to do."""
        assert self.is_lead, f"rank {self.group.rank} says what happens, only rank 0 may"
        send(self._others, call)

    def heard(self) -> Call:
        """On the other ranks: returns the next call."""
        word = receive(self._to_lead)
        if isinstance(word, Aside):
            raise self._apart(f"a call was due, and {type(word).__name__} came")
        return word

    # ---- a step

    def say_step(self, limits: Limits) -> None:
        """On rank 0: a step begins, and until the next one these limits hold on all ranks. They are
        told where they have changed."""
        told, self._limits = self._limits, limits
        self.say(Stepped(None if limits == told else limits))

    def begin(self, step: Stepped) -> None:
        """On the other ranks."""
        self._limits = step.limits or self._limits

    def limits(self, mine: Limits) -> Limits:
        """Each rank's pace is of its own clock, so only what rank 0 has said counts."""
        return self._limits or mine

    def meet(self, need: StepNeeds) -> StepAgreement:
        """LinkLost if a rank is lost, OutOfStep if it has come apart from rank 0."""
        mine = Met(
            self._step,
            need.token_count,
            need.chunk_tokens,
            need.draft_count,
            self._free(),
            need.splits,
        )
        theirs = self.from_lead(mine, Met)
        if msgspec.structs.replace(mine, splits=theirs.splits) != theirs:
            raise self._apart(f"its step is {theirs}, here it is {mine}")
        self._step += 1
        self.group.advance()
        self.latest = agreed([need._replace(splits=theirs.splits, leaves=True)])
        return self.latest

    def tell(self, make: Callable[[], StepTokens], *, is_last: bool, fed: int) -> StepTokens:
        choices = self.spread(make, StepTokens, is_last=is_last)
        if choices.fed != fed:
            raise self._apart(f"its tokens were made of {choices.fed:08x}, here of {fed:08x}")
        return choices

    def spread(self, make: Callable[[], W], kind: type[W], *, is_last: bool) -> W:
        """What the first member of the last stage makes goes to the other stages, by way of rank 0.
        The other members of the last stage get what they have made themselves."""
        word: Word | None = make() if is_last else None
        first = self.group.size - self.group.team.size
        if word is not None and self.group.rank == first and first:
            send([self._to_lead], word)
        if self.is_lead:
            word = self._as(word or receive(self.group.reports[first]), kind)
            send([self.group.reports[rank] for rank in range(1, first)], word)
        elif not is_last:
            word = receive(self._to_lead)
        return self._as(word, kind)

    def from_lead(self, mine: W, kind: type[W]) -> W:
        """The word of rank 0, instead of `mine`."""
        if self.is_lead:
            send(self._others, mine)
            return mine
        return self._as(receive(self._to_lead), kind)

    def pass_on(self, word: Aside) -> None:
        """Passes a word from rank 0 to all others, at a point where these call `passed`."""
        assert self.is_lead, f"rank {self.group.rank} says what happens, only rank 0 may"
        send(self._others, word)

    def passed(self, kind: type[W]) -> W:
        return self._as(receive(self._to_lead), kind)

    # ---- pools

    def clear_pages(self) -> None:
        """Before rank 0 lets rows from elsewhere come into pages: returns when all ranks have taken
        these pages, so that no disk stores them as what they held before."""
        if self._shelf is not None:
            self.least([])

    @property
    def _shelf(self) -> Shelf | None:
        return self._offload.owner.pools.shelf

    @property
    def layout(self) -> ModelLayout:
        """The layout of this rank's part."""
        return self._offload.layout

    def _free(self) -> tuple[int, ...]:
        pools = self._offload.owner.pools
        latent = pools.latent
        return (
            latent.pages.free_count,
            latent.prefix.idle_count,
            latent.taken_digest,
            pools.index.pages.free_count,
            pools.tables.free_count,
        )

    @property
    def _others(self) -> list[Link]:
        return [link for _, link in sorted(self.group.reports.items())]

    @property
    def _to_lead(self) -> Link:
        return self.group.reports[0]

    def _as(self, word: Word | None, kind: type[W]) -> W:
        if not isinstance(word, kind):
            raise self._apart(f"{kind.__name__} was due, and {type(word).__name__} came")
        return word

    def _apart(self, why: str) -> OutOfStep:
        return OutOfStep(
            f"rank {self.group.rank} has come apart from rank 0 at {self._step}: {why}"
        )


def _least(capacities: Sequence[Mapping[str, int]]) -> Holds:
    names = {frozenset(held) for held in capacities}
    if len(names) > 1:
        raise BadInput("layers that attend to a window are in some parts of the model only")
    return Holds({name: min(held[name] for held in capacities) for name in capacities[0]})
