"""Layers in one native call are the schedules to the bit: tokens, rows, slots, ages and counts."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.flashtrans.patient import PatientLane
from ess.kernels.cpu.layer import Stop
from ess.models import layers
from ess.overlap.policy import Mode
from tests.model.test_engine import prompt
from tests.support.built import needs_native
from tests.support.checkpoints import small
from tests.support.few import few
from tests.support.manual_clock import ManualClock
from tests.support.manual_lane import ManualLane

pytestmark = needs_native

TIMED = ("index", "plan", "pre_attn", "attend_all")
"""A layer that is absent is selected for twice by the schedules."""


class LateLane(PatientLane):
    """Copies that are not made at once land when the seed says so."""

    def __init__(self, seed: int) -> None:
        super().__init__(ManualLane(seed=seed, delay_max=3))
        self.at_once_bytes = 512 << 10

    def submit(self, copies):
        return self._lane.submit(copies)

    def mark(self):
        return self._lane.mark()


def engine(codec: str, *, mode: str, chunks: int, mtp: int = 2, lengths=(1, 90, 130, 131), **more):
    made = small("v32", layer_count=3, mtp_shares_selection=more.pop("shares", False))
    layout = made.config.layout(row=codec, index="f32" if codec == "f32" else "fp8")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * chunks,
        host_bytes=24 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=24,
        lane=LateLane(seed=chunks),
        poison=True,
        evict=more.pop("evict", "lru"),
    )
    eng = Engine(made, offload, EngineConfig(mtp=mtp, chunk_tokens=48, modes=mode, **more))
    for length in lengths:
        eng.add(prompt(length), Sampling(tokens_max=8 + length % 5, temperature=1.0, seed=length))
    return eng


def pair(codec: str, **config) -> tuple[Engine, Engine, Counter[Stop]]:
    """The same engine twice: as it is, and with schedules alone; and what stopped native layers."""
    direct, plain = (engine(codec, **config) for _ in range(2))
    plain.runner._direct.count = lambda *_: 0
    stops: Counter[Stop] = Counter()
    through, go_on = direct.runner._direct._through, direct.runner._direct._go_on

    def counted(batch, where, layers, layer):
        stops[Stop(layers.records[layer].stop)] += 1
        return go_on(batch, where, layers, layer)

    def ran(*given):
        stops[Stop.NONE] += 1
        return through(*given)

    direct.runner._direct._go_on, direct.runner._direct._through = counted, ran
    return direct, plain, stops


def same_state(one: Engine, other: Engine) -> None:
    for name in ("slot_of", "_row_of", "_last_use", "_dirty", "_ticket_of"):
        mine, theirs = (getattr(eng.offload._side.pools.sparse, name) for eng in (one, other))
        assert np.array_equal(mine, theirs), name
    pools = [eng.offload._side.pools for eng in (one, other)]
    assert np.array_equal(*(pool.sparse.slots_of(0) for pool in pools)), "rows in slots"
    assert np.array_equal(*(pool.index.keys.pages for pool in pools)), "index keys"
    for layer in range(one.offload.layout.layer_total):
        assert np.array_equal(*(pool.latent.layers[layer] for pool in pools)), f"layer {layer}"
    stats = [eng.offload.stats() for eng in (one, other)]
    for field in fields(stats[0]):
        if not field.name.endswith("_ns") and field.name != "disk":
            assert np.array_equal(*(getattr(each, field.name) for each in stats)), field.name
    assert np.array_equal(one.tuning.mode_counts, other.tuning.mode_counts)
    runs = [eng.tuning.timeline.run_count for eng in (one, other)]
    assert [runs[0][stage] for stage in TIMED] == [runs[1][stage] for stage in TIMED]
    for group in range(one.offload.layout.group_count):
        assert np.array_equal(*(pool.sparse.hit_age(group) for pool in pools)), f"ages of {group}"
    for name in ("hits", "asked"):
        assert np.array_equal(getattr(one.warmth, name), getattr(other.warmth, name)), name


def changing(eng: Engine) -> None:
    """A seed draws the mode of each layer at every step."""
    draw, layout = random.Random(5), eng.offload.layout
    modes = Mode.RESIDENT, Mode.RESIDENT, Mode.NONE, Mode.NONE, Mode.DA
    eng.tuning._wanted = lambda _: tuple(draw.choices(modes, k=layout.layer_total))


def in_turn(one: Engine, other: Engine) -> None:
    """A check asks the lane, and then copies land: only now and then."""
    while not one.is_idle:
        made = [[(m.request.number, m.tokens) for m in eng.step().made] for eng in (one, other)]
        assert made[0] == made[1]
        same_state(one, other)
        for eng in (one, other) if one.step_count % 6 == 0 else ():
            eng.check()
    assert other.is_idle
    for eng in (one, other):
        eng.offload.close()


MET = {
    ("resident", 9): {Stop.ABSENT, Stop.FETCH},
    ("resident", 2): {Stop.ABSENT},
    ("none", 9): {Stop.FETCH},
    ("none", 1): {Stop.FETCH},
}


@pytest.mark.parametrize(
    ("codec", "way"),
    few(
        [
            *(("f32", ("resident", 9)), ("f32", ("none", 1)), ("bf16", ("resident", 2))),
            *(("bf16", ("none", 9)), ("fp8", ("resident", 9)), ("fp8", ("none", 9))),
        ],
        all_of=itertools.product(("f32", "bf16", "fp8"), MET),
    ),
)
def test_native_layers_are_the_schedules(codec, way):
    """Rows on their way stop a layer in a roomy arena, rows in place in a tight one."""
    mode, chunks = way
    direct, plain, stops = pair(codec, mode=mode, chunks=chunks)
    in_turn(direct, plain)
    assert stops.pop(Stop.NONE) > 10, "no layer ran natively"
    assert set(stops) >= MET[way]


def test_modes_that_change_from_step_to_step():
    direct, plain, stops = pair("fp8", mode="none", chunks=2, mtp=3)
    for eng in (direct, plain):
        changing(eng)
    in_turn(direct, plain)
    assert (direct.tuning.mode_counts[:, : Mode.DBA] > 0).all()
    assert stops.pop(Stop.NONE) > 10, "no layer ran natively"
    assert set(stops) == {Stop.ABSENT, Stop.FETCH}


@pytest.mark.parametrize(
    ("codec", "way"),
    few(
        [("f32", ("resident", 2)), ("fp8", ("none", 9))],
        all_of=itertools.product(("f32", "fp8"), (("resident", 2), ("none", 9))),
    ),
)
def test_logits_are_those_of_the_schedules_and_stay(codec, way):
    """Also where a call stops in front of its ending, and behind later steps of as many queries."""
    mode, chunks = way
    direct, plain, stops = pair(codec, mode=mode, chunks=chunks)
    seen = [], []
    for eng, made in zip((direct, plain), seen, strict=True):
        decode = eng.runner.decode
        eng.runner.decode = lambda *given, decode=decode, made=made: (
            made.append(decode(*given)) or made[-1]
        )
    in_turn(direct, plain)
    assert len(seen[0]) == len(seen[1]) > 5
    assert len(stops) > 1, "no call stopped"
    for each, other in zip(*seen, strict=True):
        assert each.logits.equal(other.logits)
        assert each.hidden.equal(other.hidden)


def test_positions_whose_angles_are_not_kept(monkeypatch):
    """One request comes to where the kept angles grow, and the other is behind their end."""
    direct, plain, stops = pair("fp8", mode="none", chunks=9, lengths=(123, 257))
    monkeypatch.setattr(layers, "KEPT_LEAST", 64)
    monkeypatch.setattr(layers, "KEPT_MAX", 256)
    for rotary in {eng.runner.model.rotary for eng in (direct, plain)}:
        monkeypatch.setattr(rotary, "kept", rotary.kept[:0])
    in_turn(direct, plain)
    assert stops[Stop.NONE] > 10
    assert len(direct.runner.model.rotary.kept) == 256


@pytest.mark.parametrize("mode", ["none", "resident"])
def test_drafts_that_share_the_selection_of_a_native_layer(mode):
    direct, plain, stops = pair("fp8", mode=mode, chunks=9, mtp=4, shares=True)
    in_turn(direct, plain)
    assert stops[Stop.NONE] > 10


@pytest.mark.parametrize("evict", ["sieve", "score"])
def test_slots_that_give_way_by_another_policy(evict):
    direct, plain, stops = pair("fp8", mode="none", chunks=2, evict=evict)
    in_turn(direct, plain)
    assert bool(stops[Stop.NONE]) == (evict != "score"), "scores need all logits"


@pytest.mark.parametrize(("mode", "sbo"), [("da", "off"), ("none", "combine-shared")])
def test_what_is_not_alike_goes_by_its_schedule(mode, sbo):
    direct, plain, stops = pair("fp8", mode=mode, chunks=2, sbo=sbo)
    in_turn(direct, plain)
    assert not stops


def test_times_by_another_clock_are_those_of_single_stages():
    direct, plain, stops = pair("fp8", mode="none", chunks=9, lengths=(1,))
    direct.tuning.timeline.clock = ManualClock()
    in_turn(direct, plain)
    assert not stops


def test_halves_go_by_their_schedules_and_single_requests_at_once():
    direct, plain, stops = pair("fp8", mode="none", chunks=2, tbo="on")
    in_turn(direct, plain)
    steps = int(direct.tuning.mode_counts[0].sum())
    assert 0 < direct.tuning.split_count < steps
    assert stops[Stop.NONE] == 2 * (steps - direct.tuning.split_count), "layers, and the module's"


def test_a_verified_layer_is_watched_and_the_others_run_at_once():
    direct, plain, stops = pair("f32", mode="none", chunks=2, verify_every=1, verify_fatal=True)
    in_turn(direct, plain)
    assert direct.runner.verifier.checked_count == plain.runner.verifier.checked_count > 5
    assert stops[Stop.NONE] > 10


def test_an_id_that_is_not_there_is_an_assertion(monkeypatch):
    made = engine("fp8", mode="none", chunks=2)
    while not any(made.step().made):
        pass
    begin = type(made.runner._direct._rooms[next(iter(made.runner._direct._rooms))]).begin

    def astray(room, *given):
        begin(room, *given)
        room.table.fill_(1 << 30)

    monkeypatch.setattr("ess.engine.layers.direct.CallMemory.begin", astray)
    with pytest.raises(AssertionError, match=r"layer 0: an id that is not there, in SELECT"):
        made.step()


def test_memory_of_batch_sizes_is_bounded():
    made = engine("fp8", mode="none", chunks=9, mtp=1, lengths=range(1, 8))
    with torch.inference_mode():
        for _ in made.run():
            assert len(made.runner._direct._rooms) <= 4
    made.offload.close()
    assert len(made.runner._direct._rooms) == 4
