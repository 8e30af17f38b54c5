"""Requests, what waits beside the roster, steps under way, tunings and lanes find their faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ess.engine.plan import Turn
from ess.engine.requests.entry import Entry
from ess.engine.requests.followers import Followers
from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.step.tuning import VECTOR_MAX, Tuning, _Since
from ess.engine.step.underway.audit import check_flights, check_waiting
from ess.engine.step.underway.future import FutureMap
from ess.engine.tokens.counts import Tally
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.stops import StopText
from ess.flashtrans.lanes import WorkerLane
from ess.flashtrans.row_lists import RowLists
from ess.flashtrans.staging import PLACES, Staging
from ess.overlap.policy import Mode
from ess.overlap.timeline import Note
from tests.support.built import needs_native
from tests.support.layouts import PLAIN as LAYOUT
from tests.support.manual_clock import ManualClock


def request(number: int = 0, **fields: Any) -> Request:
    return Request(number=number, prompt=[1, 2, 3], sampling=Sampling(tokens_max=9), **fields)


class Steps:
    """A request that decodes and is in one step under way, and one that waits."""

    def __init__(self) -> None:
        self.roster: Roster[Request] = Roster()
        self.future = FutureMap(line_max=4, token_max=2)
        self.request = request()
        self.waiting = request(1)
        for known in (self.request, self.waiting):
            self.roster.add(known)
        self.roster.move(self.request, "prefilling")
        self.request.sequence = SimpleNamespace(line=2)  # type: ignore[assignment]
        self.request.prefilled_count = 2
        self.roster.move(self.request, "decoding")
        turn = Turn(self.request, 2)
        step = SimpleNamespace(turns=(turn,), step=SimpleNamespace(number=7))
        self.flights: deque[Any] = deque([step])
        self.future.tell(7, [])
        self.future.stash(2, [5, 6])
        self.request.flight_count, self.request.ahead_count = 1, 2
        self.request.draft_count = 1

    def check(self) -> None:
        self.roster.check()
        self.future.check()
        self.waiting.check()
        check_flights(self.flights, self.future, self.roster)


STEP_FAULTS: dict[str, tuple[Callable[[Steps], Any], str]] = {
    "a step without its request": (lambda s: s.flights.clear(), "a step is unknown"),
    "a count of steps": (lambda s: setattr(s.request, "flight_count", 2), "is in 1 steps"),
    "a count of tokens": (lambda s: setattr(s.request, "ahead_count", 3), "may make 2 tokens"),
    "no tokens": (lambda s: s.future.forget(2), "for its next step"),
    "a lost draft": (lambda s: setattr(s.request, "draft_count", 0), "for its next step"),
    "a forgotten line": (lambda s: s.future.stash(3, [4]), "that no request needs"),
    "no rows": (lambda s: setattr(s.request, "sequence", None), "has no rows"),
    "a reason": (lambda s: setattr(s.request, "reason", "stop"), "has the reason stop"),
    "a hole in the prompt": (lambda s: setattr(s.request, "prefilled_count", 1), "lacks rows"),
    "held": (lambda s: setattr(s.request, "is_held", True), "is held"),
    "too much output": (lambda s: s.request.output.extend(range(10)), "made 10 tokens"),
    "hits": (lambda s: setattr(s.request, "hit_count", 1), "more hits than rows"),
    "a waiting step": (lambda s: setattr(s.waiting, "draft_count", 1), "has drafts"),
    "waiting rows": (lambda s: setattr(s.waiting, "sequence", s.request.sequence), "has rows"),
    "an ending": (lambda s: setattr(s.waiting, "ended_by", 3), "ended by 3"),
}


def test_sound_steps_pass_their_audit() -> None:
    Steps().check()


@pytest.mark.parametrize("case", STEP_FAULTS)
def test_an_audit_of_steps_finds(case: str) -> None:
    fault, finding = STEP_FAULTS[case]
    steps = Steps()
    fault(steps)
    with pytest.raises(AssertionError, match=finding):
        steps.check()


def test_another_token_than_the_last_is_found() -> None:
    steps = Steps()
    steps.flights.clear()
    steps.future.learn(7)
    steps.request.flight_count = steps.request.ahead_count = 0
    with pytest.raises(AssertionError, match="goes on from another token"):
        steps.check()


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lambda leader, _: setattr(leader, "prefilled_count", 2), "none may wait"),
        (lambda leader, _: setattr(leader, "reason", "stop"), "has ended and holds"),
        (lambda _, follower: setattr(follower, "state", "decoding"), "is decoding"),
        (lambda _, follower: setattr(follower, "prompt", [1]), "another prompt"),
    ],
    ids=["a prompt that is there", "an end", "a state", "a prompt"],
)
def test_followers_audit_themselves(
    fault: Callable[[Request, Request], None], finding: str
) -> None:
    followers, leader, follower = Followers(), request(), request(1)
    assert followers.hold(follower, leader)
    followers.check()
    fault(leader, follower)
    with pytest.raises(AssertionError, match=finding):
        followers.check()


def test_a_request_waits_in_one_place() -> None:
    roster, followers, follower = Roster[Request](), Followers(), request(1)
    entry = Entry(SimpleNamespace(eos_ids=2, vocab_size=9), None)  # type: ignore[arg-type]
    assert followers.hold(follower, request())
    check_waiting(roster, entry, followers)
    roster.add(follower)
    with pytest.raises(AssertionError, match="waits in two places"):
        check_waiting(roster, entry, followers)


def test_an_entry_audits_itself() -> None:
    entry = Entry(SimpleNamespace(eos_ids=2, vocab_size=9), None)  # type: ignore[arg-type]
    sampling = Sampling(grammar=Grammar("json_object"))
    waiting = Request(number=0, prompt=[1], sampling=sampling)
    entry._compiling[waiting] = SimpleNamespace()  # type: ignore[assignment]
    entry.check()
    waiting.matcher = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="has a matcher"):
        entry.check()


def test_a_tally_audits_itself() -> None:
    tally = Tally([3, 4])
    tally.follow([4, 5, 5])
    tally.check([4, 5, 5, 6])
    with pytest.raises(AssertionError, match="too often or too seldom"):
        tally.check([4, 5, 4])
    with pytest.raises(AssertionError, match="more tokens were counted"):
        tally.check([4])


def test_a_text_with_stops_audits_itself() -> None:
    text = StopText(["end"])
    text.feed("the en")
    text.check()
    text._held = "the end"
    with pytest.raises(AssertionError, match="has a stop"):
        text.check()
    text._held = "other"
    with pytest.raises(AssertionError, match="begins none"):
        text.check()


NONE = (Mode.NONE,) * 2


def counted(misses: int) -> Any:
    return SimpleNamespace(miss_count=np.array([misses, misses]))


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lambda tuning: setattr(tuning, "kept", (NONE,) * 2), "kept"),
        (lambda tuning: setattr(tuning, "kept", ()), "is not kept"),
        (lambda tuning: setattr(tuning, "_fixed", NONE), "fixed modes follow"),
        (lambda tuning: setattr(tuning, "_state", None), "no policy asks"),
        (lambda tuning: setattr(tuning, "_since", _Since(counted(9), 1, 1, 1)), "have fallen"),
        (lambda tuning: setattr(tuning, "_since", _Since(counted(0), 2, 1, 1)), "a step without"),
    ],
)
def test_a_tuning_audits_itself(fault: Callable[[Tuning], None], finding: str) -> None:
    offload: Any = SimpleNamespace(
        layout=LAYOUT, clock=ManualClock(), stopwatch=None, stats=lambda: counted(5)
    )
    tuning = Tuning(offload, "layerwise")
    tuning.check()
    tuning._state = SimpleNamespace(vector=NONE)  # type: ignore[assignment]
    tuning._keep(NONE)
    tuning._since = _Since(counted(5), 1, 1, 2)
    tuning.check()
    assert len(tuning.kept) <= VECTOR_MAX
    fault(tuning)
    with pytest.raises(AssertionError, match=finding):
        tuning.check()


class Told:
    """A stopwatch whose moments are numbered, and told when asked for."""

    rests, is_on = False, True

    def __init__(self) -> None:
        self.count = 0
        self.notes: list[Note] = []

    def start(self) -> bool:
        return self.is_on

    def skip(self) -> None:
        raise AssertionError("no step is under way")

    def mark(self) -> int:
        self.count += 1
        return self.count

    def note(self, note: Note) -> None:
        self.notes.append(note)


@pytest.mark.parametrize("stopwatch", [None, Told()], ids=["host", "device"])
def test_windows_are_learned_when_the_times_of_stages_are_known(stopwatch: Told | None) -> None:
    clock = ManualClock()
    offload: Any = SimpleNamespace(layout=LAYOUT, clock=clock, stopwatch=stopwatch)
    tuning = Tuning(offload, "layerwise")
    for stage in ("select", "pre_attn", "attend_all"):
        started = tuning.timeline.start()
        clock.advance(1e-3)
        tuning.timeline.note(SimpleNamespace(number=0, first_query=0), stage, started)
    if stopwatch is not None:
        assert tuning._windows(2, 0.5) is None
        for note in stopwatch.notes:
            note(lambda moment: moment * 1_000_000)
    windows = tuning._windows(2, 0.5)
    assert windows is not None
    assert windows.window_us > 0


def ring() -> RowLists:
    """A ring of 16 numbers without its device: a sealed list and one that is not sealed yet."""
    lists = object.__new__(RowLists)
    lists.capacity, lists._cursor = 16, 6
    lists._sealed, lists._unsealed = deque([(0, 4, SimpleNamespace())]), [(4, 6)]
    return lists


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lambda lists: setattr(lists, "_cursor", 4), "would not follow"),
        (lambda lists: lists._unsealed.insert(0, (3, 4)), "two lists share"),
        (lambda lists: lists._unsealed.insert(0, (15, 17)), "a list at 15..17"),
    ],
)
def test_a_ring_of_lists_audits_itself(fault: Callable[[RowLists], None], finding: str) -> None:
    lists = ring()
    lists.check()
    fault(lists)
    with pytest.raises(AssertionError, match=finding):
        lists.check()


def test_a_staging_area_audits_itself() -> None:
    staging = object.__new__(Staging)
    staging._fetch = SimpleNamespace(turn=PLACES - 1)  # type: ignore[assignment]
    staging._events = [SimpleNamespace()] * (2 * PLACES)  # type: ignore[list-item]
    staging.check()
    staging._fetch.turn = PLACES
    with pytest.raises(AssertionError, match=f"the next place is {PLACES} of {PLACES}"):
        staging.check()


@needs_native
def test_a_lane_audits_itself() -> None:
    with WorkerLane() as lane:
        lane.check()
        lane._pending.append(SimpleNamespace(sequence=3, copies=[]))  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match="after the latest"):
            lane.check()
        lane._pending.clear()
