"""Who is in which state. The finished are in no list: nothing here grows with the past.

Requests enter a state at the end and leave it from anywhere, mostly from the front, and the first
one is looked at every step. An ordered dictionary does all three in constant time; a plain one
walks over the places of all that have left from its front.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ess.engine.request import Request, State


class Roster:
    def __init__(self) -> None:
        states: tuple[State, ...] = ("waiting", "prefilling", "decoding", "preempted")
        self._by_state: dict[State, OrderedDict[int, Request]] = {
            state: OrderedDict() for state in states
        }

    def add(self, request: Request) -> None:
        self._by_state[request.state][request.number] = request

    def move(self, request: Request, state: State) -> None:
        found = self._by_state[request.state].pop(request.number, None)
        assert found is request, f"request {request.number} is on another roster"
        request.move(state)
        if state != "finished":
            self.add(request)

    def count(self, state: State) -> int:
        return len(self._by_state[state])

    def first(self, state: State) -> Request | None:
        """The one that has been in this state longest."""
        return next(iter(self._by_state[state].values()), None)

    def of(self, state: State) -> Iterable[Request]:
        """Those that have been in this state longest come first."""
        return self._by_state[state].values()

    def by_age(self, *states: State) -> list[Request]:
        """In the order in which they were added."""
        found = [request for state in states for request in self.of(state)]
        return sorted(found, key=lambda request: request.number)
