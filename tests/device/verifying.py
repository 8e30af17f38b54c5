"""Verify mode on the pretended device: run by `test_forward_steps`."""

from __future__ import annotations

import pytest
import torch

from ess.engine.layers.verifier import Mismatched
from ess.engine.tokens.sampling import Sampling
from tests.device import engines
from tests.support.checkpoints import tokens
from tests.support.few import few
from tests.support.pretended import PRETENCE

pytestmark = pytest.mark.usefixtures("alone")

EVERY = 3


def joined(eng):
    """One request that decodes."""
    prompt = tokens(90, engines.VOCABULARY, seed=2)
    request = eng.add(prompt, Sampling(tokens_max=24, ignore_eos=True))
    while request.state != "decoding":
        eng.step()
    eng.step()
    return request


def held(eng, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's memory, and the slots in it that have rows."""
    eng.offload.drain()
    sparse, group = eng.offload._pools.sparse, eng.offload.layout.group_of(layer)
    slots = torch.from_numpy(sparse.slots(group)).to("cuda")
    there = (sparse.row_of.index_select(0, slots) >= 0).cpu()
    return eng.offload.memory(layer).slots, torch.from_numpy(sparse.slots(group))[there]


CASES = [("glm", "dba", "smallest"), ("v32", "da", "tight")]


@pytest.mark.parametrize(("family", "mode", "arena"), few(CASES[:1], all_of=CASES))
def test_a_sound_engine_says_the_same_and_has_no_mismatch(family, mode, arena):
    given = {"family": family, "mode": mode, "arena": arena, "mtp": "2"}
    checks = {"depth": "1", "graphs": "many", "verify_every": EVERY, "verify_fatal": True}
    said = []
    for device, more in (("cpu", {}), ("cuda", checks)):
        eng = engines.engine(device, **given, **more)
        said.append(joined(eng).output)
        while not eng.is_idle:
            eng.step()
        eng.check()
        eng.offload.close()
    assert said[0] == said[1]
    line = eng.graph_line()
    assert eng.verifier.checked_count == line.eager["verified"] > 2
    assert line.replayed > 2


def test_a_wrong_copy_is_found_and_named_and_no_step_waits():
    eng = engines.engine("cuda", depth="1", verify_every=EVERY)
    joined(eng)
    layer, slot = 1, 3
    memory, slots = held(eng, layer)
    spoilt = slots[slot : slot + 1].to("cuda")
    memory[spoilt] = 255 - memory[spoilt]
    ((named, row),) = eng.offload.verify(layer)
    assert (named, eng.offload.verify(0)) == (int(slots[slot]), [])
    checked, waited = eng.verifier.checked_count, []
    while eng.verifier.checked_count < checked + 3:
        PRETENCE.waited.clear()
        eng.step()
        waited.append(dict(PRETENCE.waited))
    assert {name for names in waited[1:] for name in names} == {"an earlier moment"}
    said = [mismatch.sentence for mismatch in eng.verifier.mismatches if mismatch.layer == layer]
    assert said[0] == f"slot {named} differs from row {row} on the host"
    assert {mismatch.layer for mismatch in eng.verifier.mismatches} == {layer}
    eng.offload.close()


def test_a_right_copy_of_the_wrong_row_is_found():
    eng = engines.engine("cuda", verify_every=1, verify_fatal=True)
    joined(eng)
    for layer in range(eng.offload.layout.layer_total):
        memory, slots = held(eng, layer)
        there = slots.to("cuda")
        memory[there] = memory[there.roll(1)]
    with pytest.raises(Mismatched, match="differs"):
        list(eng.run())
