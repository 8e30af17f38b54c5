"""What is GLM-5-next's own in the engine: keys of units, and what its states refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.ranks.agreement import Alone
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from tests.families.test_covered import FIRST
from tests.model import grid
from tests.states.world import GLM5, LINE, add
from tests.support import checkpoints

UNIT = 4


def held_keys(engine: Engine, request: Request, count: int) -> torch.Tensor:
    """Of the first units, float32 [layers, units, dim]: the device's, which the host has too."""
    sequence, pools = request.sequence, engine.offload.owner.pools
    assert sequence is not None
    engine.offload.drain()
    last = np.arange(UNIT - 1, count * UNIT, UNIT)
    here = sequence.holding.row_ids(0, count * UNIT)[last]
    home = sequence.holding.host_rows(0, count * UNIT)[last]
    layers = range(pools.layout.key_layer_count)
    keys = np.stack([pools.index.keys.read(layer, here) for layer in layers])
    for layer in layers:
        assert np.array_equal(pools.latent.keys.read(layer, home), keys[layer])
    return torch.from_numpy(keys).view(torch.float32)


def until_said(engine: Engine, prompt: list[int], count: int) -> Request:
    request = engine.add(prompt, Sampling(tokens_max=count + 1, ignore_eos=True))
    while len(request.output) < count:
        engine.step()
    return request


@pytest.mark.parametrize("is_late", [False, True])
def test_keys_that_steps_make_are_those_of_a_prompt(is_late: bool) -> None:
    """In both tiers, copied at once or late; also of a unit that a chunk begins and a step ends."""
    with GLM5.engines(is_late=is_late) as engine:
        request = until_said(engine, LINE[:30], 40)
        whole, stepped = LINE[:30] + request.output, held_keys(engine, request, 68 // UNIT)
    with GLM5.engines(chunk_tokens=128) as engine:
        prompted = held_keys(engine, until_said(engine, whole, 1), 68 // UNIT)
    assert (stepped - prompted).abs().max() < 1e-4
    assert prompted.abs().max() > 0.1
    assert len(set(prompted.flatten(1).tolist()[0])) > 100


def test_units_without_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["full", "full", "shared", "full"]
    raw = checkpoints.tiny_glm5_next("IIII", index_kpool=16, index_topk=32, indexer_types=kinds)
    monkeypatch.setitem(grid.RANDOM, "units", raw)
    assert grid.differences({**FIRST["glm5_next"], "checkpoint": "units"}) == []


def test_a_state_of_another_length_is_seen_at_once() -> None:
    with GLM5.engines() as engine:
        request = add(engine, LINE[:20])
        while request.state != "decoding":
            engine.step()
        assert engine.runner.beside is not None
        engine.runner.beside.lengths += 1
        with pytest.raises(AssertionError, match="states of"):
            engine.step()


def test_engines_that_divide_experts_are_refused() -> None:
    """A prompt that is cut where a state is kept would meet them more often than they know."""
    offload = GLM5.offload(chunks=2, host_bytes="1MiB")
    with offload, pytest.raises(BadInput, match="its states and experts stay in one engine"):
        Engine(GLM5.model(), offload, EngineConfig(), ranks=Alone())


def test_states_lie_in_no_device_s_memory_yet() -> None:
    with pytest.raises(BadInput, match="not on 'cuda' yet"):
        Offload.create(GLM5.layout(), slot_bytes="1MiB", host_bytes="1MiB", device="cuda")
