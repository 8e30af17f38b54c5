"""The prompts that the stages hold, and which of their chunks the next micro-batch runs.

    opened --> chunks under way, one by one --> all under way --> complete --> released
       `--> loading --> entered: its chunks may start, too

A chunk starts as soon as the one before it has left the first stage. So a prompt counts tokens as
prefilled here once they are under way; its request counts those that have passed the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ess.door.handoff.endings import Lapsed, Sent, Timeline
from ess.engine import scheduler
from ess.engine.requests.request import Request, State
from ess.engine.requests.roster import Roster
from ess.prefill.orders import Part
from ess.prefill.reports import Released
from ess.transfer.messages import Reason


@dataclass(slots=True, eq=False)
class Prompt:
    """`number` is its request's. `released` is by stage, and so is `counted`: the pages that came
    from disk. It is loading until all stages have entered it."""

    number: int
    request: Request
    uid: int
    prefilled_count: int
    opened_s: float
    state: State = "prefilling"
    made_s: float | None = None
    draft_count: int = 0
    ahead_count: int = 0
    released: dict[int, Released] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.rank

    @property
    def left_count(self) -> int:
        return self.request.left_count

    @property
    def prefill_count(self) -> int:
        return self.request.prefill_count

    @property
    def is_underway(self) -> bool:
        """Whether all of its chunks are under way."""
        return self.state == "finished"

    def ending(self, now_s: float) -> Sent | Lapsed:
        """How its handoff ended, when every stage has released it; the first failure counts."""
        timeline = Timeline(self.opened_s, ())
        if self.made_s is not None:
            timeline = timeline.marked("made", self.made_s)
        timeline = timeline.marked("over", now_s)
        for stage in sorted(self.released):
            released = self.released[stage]
            if released.reason != Reason.DONE:
                sentence = f"{released.sentence} (stage {stage})"
                return Lapsed(self.uid, Reason(released.reason), sentence, timeline)
        return Sent(self.uid, timeline)


class Prompts:
    """All prompts by number, and a roster of those with chunks left."""

    def __init__(self) -> None:
        self._by_number: dict[int, Prompt] = {}
        self._left: Roster[Prompt] = Roster()
        self._empty: list[Prompt] = []

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def has_chunks(self) -> bool:
        return bool(self._empty) or self._left.count("prefilling") > 0

    def has_uid(self, uid: int) -> bool:
        return any(prompt.uid == uid for prompt in self._by_number.values())

    def all(self) -> list[Prompt]:
        return list(self._by_number.values())

    def get(self, number: int) -> Prompt | None:
        return self._by_number.get(number)

    def add(self, prompt: Prompt) -> None:
        assert prompt.number not in self._by_number, f"prompt {prompt.number} is opened twice"
        assert not self.has_uid(prompt.uid), f"handoff {prompt.uid} is open already"
        self._by_number[prompt.number] = prompt
        if prompt.state != "loading":
            self._make_runnable(prompt)

    def enter(self, prompt: Prompt) -> None:
        assert prompt.state == "loading", f"prompt {prompt.number} is {prompt.state}"
        prompt.state = "prefilling"
        self._make_runnable(prompt)

    def _make_runnable(self, prompt: Prompt) -> None:
        """From now on its chunks may run."""
        if prompt.prefilled_count == prompt.prefill_count:
            self._empty.append(prompt)
            prompt.state = "finished"
        else:
            self._left.add(prompt)

    def first(self) -> Prompt | None:
        """The first in rank of the prompts with chunks left."""
        return min(self._left.of("prefilling"), key=lambda prompt: prompt.rank, default=None)

    def parts(self, chunk_tokens: int, positions_max: float) -> tuple[Part, ...]:
        """Takes the parts of the next micro-batch, `chunk_tokens` tokens together, of prompts with
        at most `positions_max` positions. It includes prompts that were cached whole, which run
        through no layer."""
        empty, self._empty = self._empty, []
        cached = [Part(p.number, p.prefill_count, p.prefill_count, True) for p in empty]
        if not self._left.count("prefilling"):
            return tuple(cached)
        chunks = scheduler.plan_chunks(self._left, chunk_tokens, positions_max)
        return (*cached, *(self._advance(prompt, start, stop) for prompt, start, stop in chunks))

    def _advance(self, prompt: Prompt, start: int, stop: int) -> Part:
        assert start == prompt.prefilled_count, f"prompt {prompt.number} goes on at {start}"
        prompt.prefilled_count = stop
        is_last = stop == prompt.prefill_count
        if is_last:
            self._left.move(prompt, "finished")
        return Part(prompt.number, start, stop, is_last)

    def give_up(self, prompt: Prompt) -> None:
        """Runs no more of its chunks, and removes it at once unless all are under way already."""
        if prompt.state == "loading":
            self.remove(prompt)
        elif prompt in self._empty:
            self._empty.remove(prompt)
            self.remove(prompt)
        elif not prompt.is_underway:
            self._left.move(prompt, "finished")
            self.remove(prompt)

    def remove(self, prompt: Prompt) -> None:
        del self._by_number[prompt.number]

    def check(self) -> None:
        self._left.check()
        left: Sequence[Prompt] = list(self._left.of("prefilling"))
        listed: Iterable[Prompt] = (*left, *self._empty)
        assert all(self._by_number.get(prompt.number) is prompt for prompt in listed), "a stray"
        uids = {prompt.uid for prompt in self._by_number.values()}
        assert len(uids) == len(self), "two prompts have a handoff"
        for number, prompt in self._by_number.items():
            assert prompt.number == number, f"prompt {prompt.number} stands under {number}"
            assert (prompt in left) == (prompt.state == "prefilling"), (
                f"prompt {number}: its chunks"
            )
            done, all_of_it = prompt.prefilled_count, prompt.prefill_count
            assert 0 <= done <= all_of_it, f"prompt {number}: {done} of {all_of_it}"
            is_done = done == all_of_it and prompt.state != "loading"
            assert prompt.is_underway == is_done, f"prompt {number}: {done} on the way"
