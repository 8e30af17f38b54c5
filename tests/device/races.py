"""Whole steps under the watch for races, right ones and ones with a wait left out: run by
`test_races`, in a process of its own.

The watch compares no values: it finds two touches of a word, one of them a write, that no order of
a stream, no event and no edge of a graph puts one behind the other, whatever this run did first.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import weakref
from unittest import mock

import pytest

from ess.door.device.memory import lane, uploads
from ess.door.device.steps import fetches, sealing
from ess.engine.graphs import replays
from ess.engine.step.underway import uploads as inputs
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cuda import streams
from tests.device import engines
from tests.device.steps import close
from tests.support.checkpoints import tokens
from tests.support.pairwise import pairwise
from tests.support.pretended import RACES

pytestmark = pytest.mark.usefixtures("alone")

SHORT = {
    "family": "v32",
    "mode": "da",
    "mtp": "2",
    "depth": "0",
    "arena": "smallest",
    "graphs": "few",
}
LONG = pairwise(engines.FACTORS | {"graphs": ("off", "many")})


def short(eng):
    """Requests beside each other, then one that finds the pages of the first prompt."""
    for count, seed in ((130, 3), (5, 1)):
        join(eng, count, seed, tokens_max=4)
    yield from steps(eng)
    again = join(eng, 130, 3, tokens_max=1)
    yield from steps(eng)
    assert again.cached_count
    eng.offload.drain()
    eng.offload.close()


def join(eng, count, seed, **sampling):
    prompt = tokens(count, engines.VOCABULARY, seed=seed)
    return eng.add(prompt, Sampling(ignore_eos=True, **sampling))


def steps(eng):
    while not eng.is_idle:
        yield eng.step()


@contextlib.contextmanager
def watched(case):
    """The watch begins before the engine is made: its pools are new memory."""
    with RACES.watched() as races:
        yield races, engines.engine("cuda", **case)


@contextlib.contextmanager
def never_early():
    """An event has passed only once the host has waited for it, or has read what was downloaded
    behind it. Events of the pretended device have always passed: a host that looks whether a store
    has landed is then behind all that came before, and its own early writes do not show."""
    event, download = streams.CudaEvent, uploads.Download
    record, done, wait, make, read = (
        *(event.record, event.done, event.wait),
        *(download.__init__, download.read),
    )
    count, numbers, passed = itertools.count(), weakref.WeakKeyDictionary(), [-1]

    def numbered(function):
        def noted(self, *given, **named):
            numbers[self] = next(count)
            return function(self, *given, **named)

        return noted

    def passing(function):
        def noted(self, *given):
            passed[0] = max(passed[0], numbers[self])
            return function(self, *given)

        return noted

    with contextlib.ExitStack() as patches:
        for owner, name, function in (
            (event, "record", numbered(record)),
            (event, "wait", passing(wait)),
            (event, "done", lambda self: numbers.get(self, -1) <= passed[0] and done(self)),
            (download, "__init__", numbered(make)),
            (download, "read", passing(read)),
        ):
            patches.enter_context(mock.patch.object(owner, name, function))
        yield


DEEP = {"depth": "1"}
SCORED = {"evict": "score"}
RESIDENT = {"mode": "resident", "depth": "1", "mtp": "1"}
VERIFIED = {"graphs": "off", "depth": "1", "verify_every": 1}


@pytest.mark.parametrize(
    "change",
    [
        DEEP | SCORED,
        *(pytest.param(more, marks=pytest.mark.long) for more in ({}, RESIDENT, VERIFIED)),
    ],
)
def test_nothing_races(change):
    with never_early(), watched(SHORT | change) as (races, eng):
        for _ in short(eng):
            assert races() == []


@pytest.mark.long
@pytest.mark.parametrize("case", LONG, ids=lambda case: "-".join(case.values()))
def test_nothing_races_in_a_long_scenario(case):
    with watched(case) as (races, eng):
        close(engines.scenario(eng), engines.expected(case["family"]))
        assert races() == []


# ---- a wait is left out


def within(owner, name, other, skipped):
    """While `owner.name` runs, `other.skipped` does nothing."""
    real = getattr(owner, name)

    def outer(*given, **named):
        with mock.patch.object(other, skipped):
            return real(*given, **named)

    return mock.patch.object(owner, name, outer)


def joined_once():
    """While a step is captured the lane follows compute once: so it joins the capture, without
    which a driver refuses its work."""
    capture, follow = replays.Replays._capture, DeviceLane.follow

    def outer(*given, **named):
        left = [follow]
        once = lambda *lane: left.pop()(*lane) if left else None  # noqa: E731
        with mock.patch.object(DeviceLane, "follow", once):
            return capture(*given, **named)

    return mock.patch.object(replays.Replays, "_capture", outer)


def either(one, other):
    """Whichever came first in this run."""
    return rf"{one} \w+ what .*{other} \w+,|{other} \w+ what .*{one} \w+,"


DeviceLane, StepFetches = lane.DeviceLane, fetches.StepFetches
LANE = r"on lane\.py:\d+"
MOVES, STORES = f"ess_move_rows {LANE}", rf"sealing\.py:\d+ ess_move_rows {LANE}"
IN_A_GRAPH = r"ess_move_rows on in a graph for lane\.py:\d+"
EAGER = SHORT | {"graphs": "off"}
MISTAKES = {
    "a fetch does not wait for the list of its rows": (
        EAGER,
        within(StepFetches, "queue", DeviceLane, "follow"),
        either(MOVES, "ess_resolve_together on compute"),
    ),
    "attention does not wait for its rows": (
        EAGER,
        within(StepFetches, "hold", streams.CudaEvent, "hold"),
        either(MOVES, "attend on compute"),
    ),
    "a store does not wait for the list of its rows": (
        EAGER,
        within(sealing.Sealing, "seal", DeviceLane, "follow"),
        either(STORES, "ess_seal on compute"),
    ),
    "the host reads tokens before they are there": (
        EAGER | DEEP,
        mock.patch.object(uploads.Download, "read", lambda self: self._staged),
        "tolist on the host reads what .*copy_ on compute writes,",
    ),
}
MORE = {
    "a step's inputs are written before the step under way has read its own": (
        EAGER | DEEP,
        mock.patch.object(inputs, "TURNS", 1),
        r"device_future\.py:\d+ \w+ on the host writes what .*copy_ on compute reads,",
    ),
    "all fetches of a graph follow the same place of compute": (
        SHORT,
        joined_once(),
        either(IN_A_GRAPH, "ess_resolve_together on compute"),
    ),
    "a prompt does not wait for the keys before it": (
        EAGER,
        mock.patch.object(DeviceLane, "hold_for_keys"),
        either(MOVES, "index_top_k on compute"),
    ),
}


@pytest.mark.parametrize(
    "name", [*MISTAKES, *(pytest.param(n, marks=pytest.mark.long) for n in MORE)]
)
def test_a_wait_that_is_left_out_is_found(name):
    case, mistake, says = (MISTAKES | MORE)[name]
    with never_early(), mistake, watched(case) as (races, eng):
        for _ in short(eng):
            if any(re.search(says, sentence) for sentence in races()):
                return
    raise AssertionError(races())
