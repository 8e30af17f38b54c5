"""An engine whose steps are held: what it does meanwhile, and how it goes on."""

from __future__ import annotations

import pytest

from ess.engine.process.fake_engine import PacedEngine, walking
from ess.engine.process.messages import Abort, AbortNamed, Add, Flush, Flushed, Held, Hold, Progress
from ess.engine.process.worker import EngineLoop
from ess.engine.tokens.sampling import Sampling
from tests.server.test_process import Script, build, prompt
from tests.support.checkpoints import small
from tests.support.greedy import greedy
from tests.support.manual_clock import ManualClock


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_that_are_held_go_on_where_they_were(depth: int):
    """What a step under way made is told when steps go on; a request that is aborted meanwhile
    leaves its pages at once."""
    wire = Script(
        t1=[Add(1, prompt(20), Sampling(tokens_max=9)), Add(2, prompt(90), Sampling(tokens_max=9))],
        t6=[Hold(True)],
        t12=[Add(3, prompt(30), Sampling(tokens_max=5)), Abort(2)],
        t20=[Hold(False)],
        t60=[Hold(True), AbortNamed(None, 0), Flush()],
    )
    loop = EngineLoop(build(1, depth=depth), wire, ManualClock())
    for turn in range(1, 70):
        before, busy = len(wire.given), loop.status().step_count
        loop.turn()
        assert (loop.status().step_count == busy) or not loop.status().is_held
        if 6 < turn < 20:
            fresh = wire.given[before:]
            assert not any(isinstance(message, Progress) for message in fresh)
    assert [m.is_on for m in wire.given if isinstance(m, Held)] == [True, False, True]
    assert wire.made(1) == greedy(small(), prompt(20), 9)
    assert wire.made(3) == greedy(small(), prompt(30), 5)
    assert len(wire.made(2)) < 9
    assert [m for m in wire.given if isinstance(m, Flushed)] == [Flushed("")]
    loop.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_what_is_aborted_while_steps_are_held_can_be_flushed(depth: int):
    wire = Script(
        t1=[Add(1, prompt(200), Sampling(tokens_max=30))],
        t8=[Hold(True), AbortNamed(None, 0), Flush()],
        t9=[Hold(False), Add(2, prompt(200), Sampling(tokens_max=2))],
    )
    loop = EngineLoop(build(1, depth=depth), wire, ManualClock())
    for _ in range(40):
        loop.turn()
    assert [m for m in wire.given if isinstance(m, Flushed)] == [Flushed("")]
    assert wire.pieces(2)[0].cached_count == 0
    assert wire.made(2) == greedy(small(), prompt(200), 2)
    loop.close()


@pytest.mark.parametrize("kind", ["real", "paced"])
def test_a_word_of_a_lost_engine_counts_unless_a_later_one_is_known(kind: str):
    """It is repeated by every process of the server, and each hears of the new engine at another
    moment: behind a client's resume a repeated pause changes nothing, and is never answered."""
    clock = ManualClock()
    clock.advance(50.0)
    wire = Script()
    loop = EngineLoop(build(1), wire, clock) if kind == "real" else PacedEngine(walking(512))

    def told(*messages: Hold) -> bool:
        wire.arriving[wire.turn + 1] = list(messages)
        loop.turn() if kind == "real" else loop.turn(wire)
        return loop.status().is_held

    assert told(Hold(True, 0, 10.0)), "what one process knows"
    assert told(Hold(False, 1, 9.0)), "another has missed the last word"
    assert not told(Hold(False, 1, 11.0)), "and another knows of a later one"
    assert not any(isinstance(message, Held) for message in wire.given)
    assert told(Hold(True, 0, 12.0))
    assert not told(Hold(False, 1)), "a client's own word is of now"
    assert not told(Hold(True, 2, 12.0)), "a process hears late of this engine"
    assert told(Hold(True, 2))
    [off, on] = [message for message in wire.given if isinstance(message, Held)]
    assert (off.is_on, off.front, on.is_on, on.front) == (False, 1, True, 2)
    assert 12.0 < off.at_s <= on.at_s == loop.status().held_at_s
    if kind == "real":
        loop.close()
