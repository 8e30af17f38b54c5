"""What an engine learns from the device's own clock: run by `test_pretended_steps`."""

from __future__ import annotations

import pytest

from ess.engine.tokens.sampling import Sampling
from ess.overlap.calibration import DEFAULT
from tests.device import engines
from tests.support.checkpoints import tokens

pytestmark = pytest.mark.usefixtures("alone")


def ran(**case):
    """An engine that has decoded for some time, and what its steps have taken."""
    eng, seconds = engines.engine("cuda", arena="smallest", **case), []
    for seed in (0, 1):
        prompt = tokens(60, engines.VOCABULARY, seed=seed)
        eng.add(prompt, Sampling(tokens_max=8, ignore_eos=True))
    observe = eng._flights.observe

    def observed(seen):
        if seen.request_count:
            seconds.append(seen.seconds)
        observe(seen)

    eng._flights.observe = observed
    while not eng.is_idle:
        eng.step()
        eng.check()
    return eng, seconds


@pytest.mark.parametrize(("depth", "graphs"), [("0", "off"), ("1", "many")])
def test_a_policy_follows_the_device_s_clock(depth, graphs):
    eng, seconds = ran(mode="layerwise", depth=depth, graphs=graphs)
    state, stats = eng.tuning._state, eng.offload.stats()
    assert (stats.fetch_count > 0).all()
    assert (stats.transfer_ns > 0).all()
    assert stats.moved_bytes.any()
    assert state.bytes_per_us < DEFAULT.bytes_per_us, "a tick is a millisecond"
    assert not eng.tuning._is_guessed
    assert state.hiding.window_us > 0
    # A call takes a microsecond of torch's own clock there; the host's clock has no such numbers.
    calls = [1e6 * taken - 250 for taken in seconds]
    assert calls == pytest.approx([round(count) for count in calls], abs=1e-3)
    if graphs == "many":
        held = eng._flights.replays._held
        assert {course.is_timed for course, _ in held} == {True, False}
    eng.offload.close()
