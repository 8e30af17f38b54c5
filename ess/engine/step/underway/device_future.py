"""`FutureMap` on a device: tokens that the host does not read before it learns their step.

A launch gathers its tokens by line, draws the targets, compares them with the drafts and writes
what the next launch starts from, all of it queued and none of it looked at. Targets, counts and
drafts follow to pinned memory. So the host may be a whole step behind.

What the host knows of a line is what the last learned step has left there. A request that is in no
step under way is known wholly, and only such requests may have their logits changed by the host:
`depth_reasons`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.door import Step
from ess.door.device.memory.uploads import Download
from ess.door.memory.pools import PoolSizes
from ess.engine.plan import Feed, Turn
from ess.engine.step.feeding import Outcome
from ess.engine.step.underway.uploads import Upload
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.device_draw import Columns, Drawing, draw_all
from ess.engine.tokens.logprobs import block_chances, chance_block
from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.verification import changed_logits, chosen

ABSENT: Final = -1
GREEDY: Final = Sampling()
"""What pads are drawn by."""


@dataclass(frozen=True, slots=True)
class _StepRecord:
    """The results of a step. `block` has a line for each sequence: how many targets count, `width`
    targets, then drafts. `chances` has an entry, by number, for each feed whose request wants
    chances."""

    step_number: int
    feeds: tuple[Feed, ...]
    lines: tuple[int, ...]
    width: int
    block: Download
    chances: dict[int, Download]


class DeviceFuture:
    """One more line follows the sequences' lines; pads write to it."""

    def __init__(self, sizes: PoolSizes, *, token_max: int, device: torch.device) -> None:
        shape, query_max = (sizes.sequence_max + 1, token_max), sizes.query_max
        self._pad_line = sizes.sequence_max
        self._tokens = torch.full(shape, ABSENT, dtype=torch.int64, device=device)
        self._kept: Tensor | None = None
        self._known: dict[int, tuple[int, ...]] = {}
        self._told: deque[_StepRecord] = deque()
        self._drawing = Drawing(query_max, device)
        self._spans = Upload((sizes.sequence_max, 3), torch.int64, device)
        self._owners = Upload((query_max,), torch.int64, device)

    def stash(self, line: int, tokens: Sequence[int]) -> None:
        assert line not in self._known, f"line {line}: stashed twice"
        assert line >= 0, f"line {line}: a sequence that is not on the device"
        assert min(tokens) >= 0, f"line {line}: {tokens} are no tokens"
        self._known[line] = tuple(tokens)
        for place, token in enumerate(tokens):
            self._tokens[line, place].fill_(token)

    def forget(self, line: int) -> None:
        assert line >= 0, f"line {line}: a sequence that is not on the device"
        assert all(line not in told.lines for told in self._told), f"line {line} is in a step"
        self._known.pop(line, None)
        self._tokens[line].fill_(ABSENT)

    def feed(self, step: Step, turns: Sequence[Turn], counts: Sequence[int]) -> DeviceInput:
        lines = [turn.sequence.line for turn in turns]
        feeds = [
            Feed(turn.request, self._known_of(turn, line), ABSENT)
            for turn, line in zip(turns, lines, strict=True)
        ]
        spans = [*zip(step.firsts, step.query_counts, lines, strict=True)]
        owners = [place for place, turn in enumerate(turns) for _ in range(turn.query_count)]
        samplings = [turn.request.sampling for turn in turns for _ in range(turn.query_count)]
        first_pad, pad_count = len(owners), sum(counts) - len(owners)
        spans += [(first_pad, 1, self._pad_line)] * (len(counts) - len(spans))
        return DeviceInput(
            future=self,
            step=step,
            feeds=tuple(feeds),
            lines=tuple(lines),
            width=max(counts),
            spans=self._spans.put(spans),
            owners=self._owners.put(owners + [len(counts) - 1] * pad_count),
            by=self._drawing.columns(samplings + [GREEDY] * pad_count),
        )

    def tokens_at(self, lines: Tensor, places: Tensor) -> Tensor:
        """Pads find none, and have the token 0."""
        return self._tokens[lines.long(), places.long()].clamp_min(0)

    def kept(self, logits: Tensor) -> Tensor:
        """A copy whose memory no later graph takes."""
        if self._kept is None:
            shape = len(self._owners), logits.shape[1]
            self._kept = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._kept[: len(logits)].copy_(logits)

    def _known_of(self, turn: Turn, line: int) -> tuple[int, ...]:
        """The turn's tokens; of a request in a step under way none is known."""
        if turn.request.flight_count:
            return (ABSENT,) * turn.query_count
        tokens = self._known[line][: turn.query_count]
        assert len(tokens) == turn.query_count, (
            f"line {line}: {turn.query_count} tokens of {tokens}"
        )
        return tokens

    def hand_on(self, lines: Tensor, fresh: Tensor) -> None:
        """`fresh` [sequences, n] is what the next launch starts from."""
        room = self._tokens.shape[1] - fresh.shape[1]
        self._tokens[lines] = torch.nn.functional.pad(fresh, (0, room), value=ABSENT)

    def tell(self, told: _StepRecord) -> None:
        self._told.append(told)

    def has_landed(self) -> bool:
        return not self._told or self._told[0].block.done()

    def learn(self, step_number: int) -> tuple[Outcome, ...]:
        assert self._told, f"step {step_number} was not launched, or is learned"
        launched = self._told.popleft()
        assert launched.step_number == step_number, f"step {launched.step_number} comes before"
        lists = launched.block.read().tolist()
        rows = zip(launched.feeds, launched.lines, lists, strict=True)
        return tuple(
            self._outcome(launched, place, feed, line, numbers)
            for place, (feed, line, numbers) in enumerate(rows)
        )

    def _outcome(
        self, told: _StepRecord, place: int, feed: Feed, line: int, numbers: list[int]
    ) -> Outcome:
        count = numbers[0]
        targets, drafts = tuple(numbers[1 : 1 + count]), tuple(numbers[1 + told.width :])
        assert 1 <= count <= len(feed.tokens), f"{count} tokens of {len(feed.tokens)} queries"
        known = feed._replace(tokens=self._known[line][: len(feed.tokens)])
        chances: tuple[Chance, ...] = ()
        if place in told.chances:
            chances = block_chances(told.chances[place].read()[:count].tolist())
        choice = chosen(targets)._replace(chances=chances)
        self._known[line] = (choice.tokens[-1], *drafts)
        return Outcome(known, choice, drafts)

    def step_numbers(self) -> list[int]:
        return [told.step_number for told in self._told]

    def held(self, line: int) -> list[int]:
        """Waits for the device: for audits."""
        tokens: list[int] = self._tokens[line].tolist()
        return [token for token in tokens if token != ABSENT]

    def lines(self) -> set[int]:
        return set(self._known)

    def check(self) -> None:
        numbers = self.step_numbers()
        assert numbers == sorted(set(numbers)), f"steps {numbers} do not ascend"
        filled = set(torch.nonzero(self._tokens[:-1, 0] != ABSENT)[:, 0].tolist())
        assert filled == self.lines(), f"lines {filled ^ self.lines()} have tokens or are known"
        for line, tokens in self._known.items():
            in_flight = any(line in told.lines for told in self._told)
            assert in_flight or self.held(line) == list(tokens), f"line {line}: not {tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInput:
    """`spans` are of each sequence its first query, how many it has, and its line; `owners` of each
    query its sequence. Both go on behind `lines` where the step has pads."""

    future: DeviceFuture
    step: Step
    feeds: tuple[Feed, ...]
    lines: tuple[int, ...]
    width: int
    spans: Tensor
    owners: Tensor
    by: Columns

    @property
    def tokens(self) -> Tensor:
        step = self.step
        return self.future.tokens_at(on_device(step.query_line), on_device(step.query_offset))

    @property
    def form(self) -> bool:
        """Whether a request asks for chances of tokens, so that logits are kept."""
        return any(feed.request.sampling.logprobs is not None for feed in self.feeds)

    def choose(self, logits: Tensor) -> DeviceChosen:
        step, counts = self.step, self.step.query_counts
        changed, open_counts = changed_logits(self.feeds, logits, counts)
        positions = on_device(step.query_start).long() + on_device(step.query_offset) + 1
        drawn = draw_all(changed, self.by, positions)
        targets, accepted = self._verified(drawn)
        if any(feed.request.matcher is not None for feed in self.feeds):
            limits = torch.tensor(open_counts).to(accepted.device)
            accepted = torch.minimum(accepted, limits)
        kept = self.future.kept(logits) if self.form else None
        return DeviceChosen(self, drawn, targets, accepted, kept)

    def _verified(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Targets [sequences, queries of the longest], and how many count: those up to the first
        that differs from its draft."""
        firsts, counts, _ = self.spans.unbind(1)
        offsets = torch.arange(self.width, device=drawn.device)
        at = firsts[:, None] + torch.minimum(offsets, counts[:, None] - 1)
        targets, fed = drawn[at], self.tokens[at]
        right = (fed[:, 1:] == targets[:, :-1]) & (offsets[1:] < counts[:, None])
        return targets, 1 + right.long().cumprod(1).sum(1)

    def chances(self, logits: Tensor, drawn: Tensor) -> dict[int, Download]:
        """Downloads of chances, by the place of the feed, for requests that ask for them."""
        downloads = {}
        spans = zip(self.feeds, self.step.firsts, self.step.query_counts, strict=True)
        for place, (feed, first, count) in enumerate(spans):
            top_count = feed.request.sampling.logprobs
            if top_count is not None:
                mine = slice(first, first + count)
                downloads[place] = Download(chance_block(logits[mine], drawn[mine], top_count))
        return downloads


@dataclass(frozen=True, slots=True)
class DeviceChosen:
    fed: DeviceInput
    drawn: Tensor
    targets: Tensor
    counts: Tensor
    logits: Tensor | None

    @property
    def last(self) -> Tensor:
        return (self.fed.spans[:, 0] + self.counts - 1).int()

    @property
    def following(self) -> Tensor:
        is_kept = on_device(self.fed.step.query_offset) < self.counts[self.fed.owners]
        return torch.where(is_kept, self.drawn, 0).clamp_min(0)

    def with_drafts(self, drafts: Tensor | None) -> DeviceOutput:
        newest = self.drawn[self.last][:, None].clamp_min(0)
        guesses = newest[:, :0] if drafts is None else drafts
        block = torch.cat((self.counts[:, None], self.targets, guesses), dim=1)
        self.fed.future.hand_on(self.fed.spans[:, 2], torch.cat((newest, guesses), dim=1))
        return DeviceOutput(self.counts.int(), block, self.drawn, self.logits)


@dataclass(frozen=True, slots=True)
class DeviceOutput:
    accepted: Tensor
    block: Tensor
    drawn: Tensor
    logits: Tensor | None

    def tell(self, fed: DeviceInput) -> None:
        block = Download(self.block[: len(fed.lines)])
        chances = {} if self.logits is None else fed.chances(self.logits, self.drawn)
        number, width = fed.step.number, fed.width
        fed.future.tell(_StepRecord(number, fed.feeds, fed.lines, width, block, chances))


def on_device(array: object) -> Tensor:
    """An array of a step on a device, which has an entry for each query."""
    assert isinstance(array, Tensor), "a step of the host"
    return array
