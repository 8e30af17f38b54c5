"""Verify mode sees a wrong copy and a wrong read, and nothing where nothing is wrong."""

from __future__ import annotations

import itertools

import pytest
import torch

from ess.engine.layers.verifier import Mismatched
from ess.engine.tokens.sampling import Sampling
from tests.model.test_engine import engine, prompt, run
from tests.support.few import few


@pytest.mark.parametrize(
    ("family", "mode"),
    few(
        [("glm", "resident"), ("v32", "none"), ("glm", "da"), ("v32", "dba")],
        all_of=itertools.product(("v32", "glm"), ("resident", "none", "da", "dba")),
    ),
)
def test_a_sound_engine_has_no_mismatch(family, mode):
    eng = engine(family, mtp=2, modes=mode, chunks=1, verify_every=1, verify_fatal=True)
    for length in (70, 100):
        eng.add(prompt(length), Sampling(tokens_max=8))
    run(eng)
    assert eng.verifier.checked_count > eng.offload.layout.layer_total
    assert eng.verifier.mismatch_count == 0


def decoding(**config):
    eng = engine("v32", modes="none", chunks=4, **config)
    eng.add(prompt(90), Sampling(tokens_max=30))
    for _ in range(4):
        eng.step()
    eng.offload.drain()
    return eng


def test_a_wrong_copy_is_found_and_named():
    eng = decoding(verify_every=1)
    pools = eng.offload._pools
    slots, rows = pools.sparse.copies(1)
    pools.sparse.slots_of(0)[slots[3], 5] ^= 1
    assert eng.offload.verify(1) == [(int(slots[3]), int(rows[3]))]
    assert eng.offload.verify(0) == []
    for _ in range(6):
        eng.step()
    said = [mismatch.sentence for mismatch in eng.verifier.mismatches if mismatch.layer == 1]
    assert f"slot {slots[3]} differs from row {rows[3]} on the host" in said


def test_a_right_copy_of_the_wrong_row_is_found():
    eng = decoding(verify_every=1, verify_fatal=True)
    pools = eng.offload._pools
    slab = torch.from_numpy(pools.sparse.slots_of(0))
    for group in range(3):
        slots, _ = pools.sparse.copies(group)
        rows = torch.from_numpy(slots).long()
        slab[rows] = slab[rows.roll(1)]
    with pytest.raises(Mismatched, match="differs"):
        run(eng)
