"""Stages of a device as a profiler sees them: run by `test_pretended_steps`."""

from __future__ import annotations

import pytest
import torch

from ess.engine.tokens.sampling import Sampling
from tests.device import engines
from tests.support.checkpoints import tokens

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def told(monkeypatch):
    """What was pushed, and how deep; None for what was popped."""
    events = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append(None))
    return events


def first_step(**given):
    eng = engines.engine("cuda", mode="da", **given)
    eng.add(tokens(1, engines.VOCABULARY, seed=1), Sampling(tokens_max=2, ignore_eos=True))
    return eng


def test_stages_open_and_close_in_their_order(told):
    eng = first_step(nvtx=True)
    eng.step()
    opened, closed = told[::2], told[1::2]
    assert set(closed) == {None}
    layers = eng.offload.layout.layer_total
    for layer in range(layers):
        mine = [name.split()[0] for name in opened if name.endswith(f" L{layer}")]
        assert mine[0] == "index"
        assert mine.index("plan") < mine.index("wait") < mine.index("attend_fetched")
    numbers = [int(name.rpartition("L")[2]) for name in opened]
    assert numbers == sorted(numbers)
    eng.offload.close()


def test_a_stage_that_fails_is_closed(told, monkeypatch):
    def fails(self, *args):
        raise RuntimeError("a kernel that does not load")

    monkeypatch.setattr("ess.engine.layers.attention.queries", fails)
    eng = first_step(nvtx=True)
    with pytest.raises(RuntimeError, match="does not load"):
        eng.step()
    assert told[-2:] == ["pre_attn L0", None]
    assert len(told[::2]) == told.count(None)
    eng.offload.close()


def test_nobody_is_told_who_has_not_asked(told):
    eng = first_step()
    eng.step()
    assert told == []
    eng.offload.close()
