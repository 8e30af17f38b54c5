"""Counts and tokens that are not on the host yet, and when the host may not run ahead of them.

The host plans and launches step s + 1 before it has learned step s. What s + 1 starts from (the
newest token and the drafts behind it) lies here by line, on the device: a launch stashes it, the
next launch of that line takes it. The results of s lie here by step, in order, until the host
learns them. Each can be taken once; taking what is not there is our own mistake. Lengths are device
data too; the page tables have them.

Everything in a launch may read this map, for a launch runs in device order, behind the step before.
Nothing else may: the plan, admission and pages follow from learned counts and from bounds. A step
makes for each request at least one token and at most as many as the request has queries in it, so
a request may have from `flight_count` to `ahead_count` tokens more than the host knows. A request
that may have reached its last token is not launched again. A request that a stop id has ended,
unknown to the host, runs one surplus step; what that step says of it is dropped.

Some draws need the tokens themselves, so the host must learn s before it launches s + 1. Such a
request could wait every other step, and the others run on; but a decode step reads all weights
however few requests are in it, so half-empty steps cost more than the gap that they hide. The whole
batch therefore runs at depth 0 as long as such a request is in it: `depth_reasons`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ess.door import Step
from ess.engine.plan import Feed, Turn
from ess.engine.requests.request import Request
from ess.engine.step.feeding import Outcome
from ess.engine.tokens.verification import Choice, choose_all


def depth_reasons(requests: Iterable[Request], *, on_device: bool = False) -> tuple[str, ...]:
    """Why a batch of these requests runs at depth 0, a sentence per reason; none if it need not."""
    return tuple(
        f"request {request.number}: {reason}"
        for request in requests
        if not request.is_plain
        for reason in _reasons(request, on_device=on_device)
    )


def _reasons(request: Request, *, on_device: bool) -> tuple[str, ...]:
    sampling = request.sampling
    reasons = sampling.host_reasons(len(request.output))
    if on_device and not reasons and sampling.changes_logits:
        return ("the host changes its logits",)
    return reasons


class FutureMap:
    def __init__(self, *, line_max: int, token_max: int) -> None:
        assert line_max > 0, line_max
        assert token_max > 0, token_max
        self._tokens: list[list[int]] = [[] for _ in range(line_max)]
        self._token_max = token_max
        self._outcomes: deque[tuple[int, tuple[Outcome, ...]]] = deque()

    def feed(self, step: Step, turns: Sequence[Turn], counts: Sequence[int]) -> HostInput:
        assert tuple(counts) == step.query_counts, f"pads on the host: {counts}"
        positions = step.positions.tolist()
        feeds = [
            Feed(turn.request, self.take(line, turn.query_count), positions[first])
            for turn, line, first in zip(turns, step.lines, step.firsts, strict=True)
        ]
        return HostInput(self, step, feeds)

    def stash(self, line: int, tokens: Sequence[int]) -> None:
        """The newest token of a line and the drafts behind it, for its next launch."""
        assert line >= 0, f"line {line}: a sequence that is not on the device"
        assert not self._tokens[line], f"line {line}: stashed twice, taken once"
        assert min(tokens) >= 0, f"line {line}: {tokens} are no tokens"
        assert len(tokens) <= self._token_max, f"line {line}: more than {self._token_max} tokens"
        self._tokens[line] = list(tokens)

    def take(self, line: int, count: int) -> tuple[int, ...]:
        """The first `count` of them; the other drafts are forgotten."""
        assert line >= 0, f"line {line}: a sequence that is not on the device"
        tokens = tuple(self._tokens[line][:count])
        assert len(tokens) == count, f"line {line}: tokens were not produced, or taken before"
        self._tokens[line] = []
        return tokens

    def forget(self, line: int) -> None:
        assert line >= 0, f"line {line}: a sequence that is not on the device"
        self._tokens[line] = []

    def tell(self, step_number: int, outcomes: Iterable[Outcome]) -> None:
        """A launch has ended: this is for the host, when it asks."""
        assert all(number < step_number for number, _ in self._outcomes), "steps end in order"
        self._outcomes.append((step_number, tuple(outcomes)))

    def has_landed(self) -> bool:
        return True

    def learn(self, step_number: int) -> tuple[Outcome, ...]:
        """The outcomes of a step, which can be taken once, and in the order of steps."""
        assert self._outcomes, f"step {step_number} was not launched, or is learned"
        number, outcomes = self._outcomes.popleft()
        assert number == step_number, f"step {number} comes before step {step_number}"
        return outcomes

    def step_numbers(self) -> list[int]:
        """The steps that the host has not learned, in order."""
        return [number for number, _ in self._outcomes]

    def held(self, line: int) -> list[int]:
        """The tokens that wait here for the next launch of the line."""
        return list(self._tokens[line])

    def lines(self) -> set[int]:
        """The lines that have tokens here."""
        return {line for line, tokens in enumerate(self._tokens) if tokens}

    def check(self) -> None:
        numbers = self.step_numbers()
        assert numbers == sorted(set(numbers)), f"steps {numbers} do not ascend"
        for line, tokens in enumerate(self._tokens):
            assert min(tokens, default=0) >= 0, f"line {line}: a token below zero"
            assert len(tokens) <= self._token_max, f"line {line}: {len(tokens)} tokens"


@dataclass(frozen=True, slots=True)
class HostInput:
    """`StepInput`, all of it known."""

    future: FutureMap
    step: Step
    feeds: Sequence[Feed]

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([token for feed in self.feeds for token in feed.tokens])

    @property
    def form(self) -> tuple[()]:
        return ()

    def choose(self, logits: Tensor) -> HostChosen:
        choices = choose_all(self.feeds, logits)
        for feed, choice in zip(self.feeds, choices, strict=True):
            count = len(choice.tokens)
            assert 1 <= count <= len(feed.tokens), f"{count} tokens of {len(feed.tokens)} queries"
        return HostChosen(self, choices)


@dataclass(frozen=True, slots=True)
class HostChosen:
    fed: HostInput
    choices: Sequence[Choice]

    @property
    def last(self) -> list[int]:
        kept = zip(self.fed.step.firsts, self.choices, strict=True)
        return [first + len(choice.tokens) - 1 for first, choice in kept]

    @property
    def following(self) -> Tensor:
        following = [0] * self.fed.step.query_count
        for first, choice in zip(self.fed.step.firsts, self.choices, strict=True):
            following[first : first + len(choice.tokens)] = choice.tokens
        return torch.tensor(following)

    def with_drafts(self, drafts: Tensor | None) -> HostOutput:
        listed = [[]] * len(self.choices) if drafts is None else drafts.tolist()
        return HostOutput(self.choices, listed)


@dataclass(frozen=True, slots=True)
class HostOutput:
    choices: Sequence[Choice]
    drafts: Sequence[Sequence[int]]

    @property
    def accepted(self) -> list[int]:
        return [len(choice.tokens) for choice in self.choices]

    def tell(self, fed: HostInput) -> None:
        outcomes = []
        of_requests = zip(fed.feeds, fed.step.lines, self.choices, self.drafts, strict=True)
        for feed, line, choice, guesses in of_requests:
            fed.future.stash(line, [choice.tokens[-1], *guesses])
            outcomes.append(Outcome(feed, choice, tuple(guesses)))
        fed.future.tell(fed.step.number, outcomes)
