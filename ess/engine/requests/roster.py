"""The requests by state. Finished requests are in no list: nothing here grows with the past.

The engine looks at the first waiting request in every step, and any number may wait, so this state
keeps a heap of ranks beside the dictionary. A request leaves from anywhere; its rank stays in the
heap until it comes to the top, where ranks of requests that have left are dropped, or until most of
the heap has left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar, get_args

from ess.engine.requests.request import MOVES, State

SPARE: Final = 64


class Runnable(Protocol):
    """What roster and scheduler ask of a request, real or simulated."""

    number: int
    state: State
    draft_count: int
    ahead_count: int
    prefilled_count: int

    @property
    def rank(self) -> tuple[int, int]: ...
    @property
    def left_count(self) -> int: ...
    @property
    def prefill_count(self) -> int: ...


AnyRequest = TypeVar("AnyRequest", bound=Runnable)


class Roster(Generic[AnyRequest]):
    def __init__(self) -> None:
        listed = (state for state in get_args(State) if state != "finished")
        self._by_state: dict[State, dict[int, AnyRequest]] = {state: {} for state in listed}
        self._ranks: list[tuple[int, int]] = []
        self._sorted: dict[tuple[State, ...], tuple[AnyRequest, ...]] = {}

    def add(self, request: AnyRequest) -> None:
        assert request.state != "finished", f"request {request.number} is finished"
        assert request.number not in self._by_state[request.state], f"{request.number} is here"
        self._by_state[request.state][request.number] = request
        self._sorted.clear()
        if request.state == "waiting":
            heapq.heappush(self._ranks, request.rank)

    def move(self, request: AnyRequest, state: State) -> None:
        listed = self._by_state[request.state].pop(request.number, None)
        self._sorted.clear()
        assert listed is request, f"request {request.number} is on another roster"
        assert (request.state, state) in MOVES, f"{request.number}: {request.state} -> {state}"
        request.state = state
        if state != "finished":
            self.add(request)

    def count(self, *states: State) -> int:
        return sum(len(self._by_state[state]) for state in states)

    def first_waiting(self) -> AnyRequest | None:
        """The waiting request that is first in rank."""
        ranks, waiting = self._ranks, self._by_state["waiting"]
        if len(ranks) > 2 * len(waiting) + SPARE:
            ranks[:] = sorted(request.rank for request in waiting.values())
        while ranks and ranks[0][1] not in waiting:
            heapq.heappop(ranks)
        assert bool(ranks) == bool(waiting), f"{len(waiting)} wait, {len(ranks)} have a rank"
        return waiting[ranks[0][1]] if ranks else None

    def of(self, state: State) -> Iterable[AnyRequest]:
        return self._by_state[state].values()

    def by_rank(self, *states: State) -> tuple[AnyRequest, ...]:
        """Sorted again only when a request has come, moved or left."""
        ranked = self._sorted.get(states)
        if ranked is None:
            assert len(set(states)) == len(states), f"a state is named twice: {states}"
            requests = [request for state in states for request in self.of(state)]
            ranked = tuple(sorted(requests, key=lambda request: request.rank))
            self._sorted[states] = ranked
        return ranked

    def check(self) -> None:
        numbers = [number for listed in self._by_state.values() for number in listed]
        assert len(set(numbers)) == len(numbers), "a request is in two states"
        for state, requests in self._by_state.items():
            for number, request in requests.items():
                assert request.number == number, f"request {request.number} is listed as {number}"
                assert request.state == state, f"request {number} is {request.state}, not {state}"
        for states, ranked in self._sorted.items():
            listed = sorted(number for state in states for number in self._by_state[state])
            numbers = sorted(request.number for request in ranked)
            assert numbers == listed, f"{states}: {numbers} are sorted, {listed} are listed"
        ranks = self._ranks
        lost = self._by_state["waiting"].keys() - {number for _, number in ranks}
        assert not lost, f"requests {lost} wait and have no rank"
        assert all(ranks[(at - 1) // 2] <= ranks[at] for at in range(1, len(ranks))), "no heap"
