"""What must hold between requests, steps under way and the future map, which no single owner can
check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ess.engine.requests.entry import Entry
from ess.engine.requests.followers import Followers
from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.step.decode import Flight
from ess.engine.step.feeding import Future


def check_waiting(roster: Roster[Request], entry: Entry, followers: Followers) -> None:
    """A request waits in one place: on the roster, for its grammar, or for its leader's prompt."""
    waiting = [*roster.of("waiting"), *entry.waiting(), *followers.waiting()]
    assert len(set(waiting)) == len(waiting), "a request waits in two places"
    for request in waiting:
        assert request.state == "waiting", f"request {request.number} is {request.state}"
        request.check()


def check_flights(flights: Collection[Flight], future: Future, roster: Roster[Request]) -> None:
    """An ended request stays in the steps that were launched before the host knew of its ending,
    and keeps its line until the last of them is learned."""
    running = roster.by_rank("landing", "loading", "prefilling", "decoding", "preempted")
    turns = [turn for flight in flights for turn in flight.turns]
    assert future.step_numbers() == [flight.step.number for flight in flights], "a step is unknown"
    steps, tokens = Counter[Request](), Counter[Request]()
    for turn in turns:
        steps[turn.request] += 1
        tokens[turn.request] += turn.query_count
    requests = {*running, *steps}
    for request in requests:
        name = f"request {request.number}"
        assert request.flight_count == steps[request], f"{name} is in {steps[request]} steps"
        assert request.ahead_count == tokens[request], f"{name} may make {tokens[request]} tokens"
        assert request.state in ("decoding", "finished") or not steps[request], f"{name} runs"
        request.check()
    _check_lines(future, requests)


def _check_lines(future: Future, requests: Iterable[Request]) -> None:
    """A line holds tokens exactly if its request may still decode with them."""
    taken: set[int] = set()
    for request in requests:
        if request.state not in ("decoding", "finished"):
            continue
        name = f"request {request.number}"
        assert request.sequence is not None, f"{name} has no rows"
        line = request.sequence.line
        assert line not in taken, f"{name} shares line {line} with another request"
        taken.add(line)
        tokens = future.held(line)
        assert len(tokens) == 1 + request.draft_count, f"{name}: {tokens} for its next step"
        if request.flight_count == 0:
            assert tokens[0] == request.tokens[-1], f"{name} goes on from another token"
    assert future.lines() == taken, f"lines {future.lines() ^ taken}: tokens that no request needs"
