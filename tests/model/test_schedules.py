"""Schedules in the engine: same tokens whatever the order, and what the order was and hid."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ess.cost import Calibration
from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.step.tuning import LOOK_EVERY
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.flashtrans.lanes import InlineLane
from ess.kernels.ops import Ops
from ess.layout import ModelLayout
from ess.overlap.calibration import shape_of
from ess.overlap.policy import PATIENCE, Mode
from tests.model.test_engine import expected, prompt, run
from tests.support.checkpoints import small
from tests.support.few import pairs
from tests.support.manual_clock import ManualClock
from tests.support.manual_lane import ManualLane
from tests.support.timed import TimedLane, TimedOps

LENGTHS = (1, 2, 90, 130)


def engine(
    family: str, *, chunks: int = 1, lane: Any = None, mtp: int = 1, clock: Any = None, **config
) -> Engine:
    made = small(family, layer_count=3)
    layout = made.config.layout(row="f32", index="f32", has_mtp=mtp > 1)
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * chunks,
        host_bytes=24 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=24,
        lane=lane or ManualLane(seed=chunks, delay_max=3),
        clock=clock,
        poison=True,
    )
    return Engine(made, offload, EngineConfig(mtp=mtp, chunk_tokens=48, **config))


def finished(eng: Engine, family: str, count: int = 10, lengths=LENGTHS) -> None:
    made = [eng.add(prompt(length), Sampling(tokens_max=count)) for length in lengths]
    run(eng)
    for request in made:
        assert request.output == expected(family, len(request.prompt), count), len(request.prompt)


@pytest.mark.parametrize("mode", ["resident", "none", "da", "dba"])
def test_a_whole_list_is_said_to_be_one(monkeypatch, mode):
    """A kernel that takes all of a device may have it; not one beside which rows are copied, which
    leaves the copy its part. Where rows were only located none is in place, nor where they were
    fetched: these are added to the others."""
    said, attend = set(), Ops.attend

    def watched(ops, *given, **options):
        if "whole" in options:
            is_said = {"placed": options["placed"] is not None}
            is_said |= {name: options[name] for name in ("whole", "spares", "adds")}
            said.add(tuple(name for name, is_so in is_said.items() if is_so))
        return attend(ops, *given, **options)

    monkeypatch.setattr(Ops, "attend", watched)
    eng = engine("v32", chunks=9 if mode == "resident" else 2, modes=mode)
    finished(eng, "v32", count=3, lengths=(90,))
    apart = {("placed", "spares"), ("adds",)}
    whole = {"resident": {("whole",)}, "none": {("placed", "whole")}}
    assert whole[mode] <= said if mode in whole else said == apart, said


def timed(family: str, mode: str, *, row_ns: int = 1000, attend_ns: int = 100, **config) -> Engine:
    """Copies and attention take simulated time, everything else none."""
    clock = ManualClock()
    lane = TimedLane(clock, row_ns=row_ns)
    eng = engine(family, lane=lane, clock=clock, modes=mode, **config)
    runner = eng.runner
    runner.ops = TimedOps(runner.ops, clock, attend_ns=attend_ns, select_ns=4000)
    return eng


@pytest.mark.parametrize(*pairs(family=("v32", "glm"), chunks=(1, 2, 8), mtp=(1, 3)))
def test_layerwise_gives_the_plain_model_s_tokens(family, chunks, mtp):
    eng = engine(family, chunks=chunks, mtp=mtp, modes="layerwise")
    finished(eng, family)
    ran = eng.tuning.mode_counts.sum(0)
    assert (ran[Mode.RESIDENT] > ran.sum() / 2) == (chunks == 8), ran
    assert chunks == 8 or ran[Mode.NONE] > 0


def test_nothing_is_hidden_without_overlap_and_nothing_waits_that_is_resident():
    eng = timed("v32", "none")
    finished(eng, "v32")
    stats = eng.offload.stats()
    assert (stats.transfer_ns > 0).all()
    assert (stats.exposed_ns >= stats.transfer_ns).all()
    assert (stats.hidden_ns == 0).all()
    calm = timed("v32", "layerwise", chunks=8)
    request = calm.add(prompt(130), Sampling(tokens_max=10))
    while len(request.output) < 2:
        calm.step()
    before = calm.offload.stats().exposed_ns
    run(calm)
    assert (calm.offload.stats().exposed_ns == before).all()


@pytest.mark.parametrize("attend_ns", [0, 20, 100, 10_000])
def test_da_hides_behind_attention_over_resident_rows(attend_ns):
    """One request at a time, so no store of another step is on the lane: the sums are exact."""
    eng = timed("v32", "da", attend_ns=attend_ns)
    eng.add(prompt(130), Sampling(tokens_max=1))
    list(eng.run())
    eng.add(prompt(131), Sampling(tokens_max=2))
    while not eng.is_idle:
        eng.offload.drain()
        before = eng.offload.stats()
        eng.step()
        after = eng.offload.stats()
        for layer in range(3):
            moved_ns = after.transfer_ns[layer] - before.transfer_ns[layer]
            hits = after.hit_count[layer] - before.hit_count[layer]
            hits += after.place_count[layer] - before.place_count[layer]
            assert moved_ns == 1000 * (after.miss_count[layer] - before.miss_count[layer])
            exposed_ns = after.exposed_ns[layer] - before.exposed_ns[layer]
            assert exposed_ns == pytest.approx(max(0, moved_ns - hits * attend_ns), abs=3)
            hidden_ns = after.hidden_ns[layer] - before.hidden_ns[layer]
            assert hidden_ns == pytest.approx(moved_ns - exposed_ns, abs=3)
    assert eng.offload.stats().miss_count.sum() > 0


def test_a_lane_that_copies_at_submission_hides_nothing():
    eng = engine("v32", lane=InlineLane(), modes="da")
    finished(eng, "v32", lengths=(90, 130))
    stats = eng.offload.stats()
    assert stats.transfer_ns.sum() > 0
    assert (stats.exposed_ns == stats.transfer_ns).all()
    assert stats.hidden_ns.sum() == 0


def test_resident_is_none_to_the_bit():
    logits = {}
    for mode in ("resident", "none", "layerwise"):
        eng = engine("v32", chunks=8, modes=mode)
        for length in LENGTHS:
            eng.add(prompt(length), Sampling(tokens_max=8))
        seen = []
        runner, decode = eng.runner, eng.runner.decode
        runner.decode = lambda batch, ids, decode=decode, seen=seen: (
            seen.append(decode(batch, ids)) or seen[-1]
        )
        run(eng)
        logits[mode] = [forward.logits for forward in seen]
        resident_count = eng.tuning.mode_counts[:, Mode.RESIDENT].sum()
        assert (resident_count > 0) == (mode != "none")
    for mode in ("resident", "layerwise"):
        assert len(logits[mode]) == len(logits["none"])
        assert all(a.equal(b) for a, b in zip(logits[mode], logits["none"], strict=True))


def test_residency_ends_under_pressure_and_returns_after_it():
    eng = engine("v32", chunks=8, modes="layerwise")
    counts = eng.tuning.mode_counts
    first = eng.add(prompt(90), Sampling(tokens_max=60))
    while len(first.output) < 10:
        eng.step()
    assert counts[0, Mode.RESIDENT] > 0
    crowd = [eng.add(prompt(length), Sampling(tokens_max=12)) for length in (330, 250)]
    before = counts[0, Mode.RESIDENT]
    while any(request.state != "finished" for request in crowd):
        eng.step()
    assert counts[0, Mode.NONE] > 3
    eng.offload.drain()
    first.sequence.fill()
    eng.offload.drain()
    run(eng)
    assert counts[0, Mode.RESIDENT] > before + 10
    assert first.output == expected("v32", 90, 60)


def test_followers_are_fetched_ahead_of_their_own_stage():
    eng = timed("glm", "da", row_ns=10, attend_ns=1000)
    finished(eng, "glm")
    layout, stats = eng.offload.layout, eng.offload.stats()
    leaders = [group[0] for group in layout.groups]
    followers = [layer for layer in range(layout.layer_total) if layer not in leaders]
    assert followers
    for layer in leaders:
        assert stats.ahead_count[layer] == 0
    for layer in followers:
        assert stats.ahead_count[layer] == stats.fetch_count[layer] > 0
        assert stats.exposed_ns[layer] == 0, "the leader's attention was long enough for all"


def test_layers_of_a_group_share_a_mode():
    layout = engine("glm", modes="none").offload.layout
    assert len(layout.groups[-1]) > 1
    modes = ["none"] * (layout.layer_total - 1) + ["da"]
    with pytest.raises(BadInput, match="share a selection"):
        engine("glm", modes=modes)


def test_layerwise_turns_to_da_when_it_has_won_for_long():
    """Attention outlasts every fetch, so DA hides all of it: after `PATIENCE` steps it is taken."""
    eng = timed("v32", "layerwise", row_ns=100_000, attend_ns=400_000)
    request = eng.add(prompt(130), Sampling(tokens_max=2 * PATIENCE))
    counts = eng.tuning.mode_counts
    while counts[0, Mode.DA] == 0 and not eng.is_idle:
        eng.step()
    assert PATIENCE <= counts[0, Mode.NONE] <= PATIENCE + LOOK_EVERY
    assert eng.tuning.kept == ((Mode.NONE,) * 3, (Mode.DA,) * 3)
    before = eng.offload.stats()
    run(eng)
    after = eng.offload.stats()
    moved_ns, exposed_ns = (
        after.transfer_ns - before.transfer_ns,
        after.exposed_ns - before.exposed_ns,
    )
    assert (before.exposed_ns >= 0.9 * before.transfer_ns).all()
    assert (exposed_ns < 0.2 * moved_ns).all()
    assert request.output == expected("v32", 130, 2 * PATIENCE)


def calibrated(folder: Path, misses: list[float], layout: ModelLayout) -> str:
    """Windows of a millisecond, a byte a microsecond, splits for nothing."""
    times = {"attend_query_us": 1000.0, "bytes_per_us": 1.0}
    rows = [
        {
            "name": f"calibrate: {name}",
            "value": times.get(name, 0.0),
            "config": {"layout": shape_of(layout)},
        }
        for name in (*(field.name for field in fields(Calibration)), "bytes_per_us")
    ]
    rows += [
        {"name": "calibrate: misses", "value": each, "config": {"context": 128, "layer": layer}}
        for layer, each in enumerate(misses)
    ]
    path = folder / "calibration.json"
    machine = {"cpu": "a CPU", "cores": 2}
    path.write_bytes(msgspec.json.encode({"machine": machine, "rows": rows}))
    return str(path)


def test_a_calibration_decides_the_first_step(tmp_path):
    layout = engine("v32").offload.layout
    path = calibrated(tmp_path, [0.0, 1.0, 0.0], layout)
    eng = engine("v32", modes="layerwise", calibration=path)
    request = eng.add(prompt(130), Sampling(tokens_max=3))
    run(eng)
    ran = eng.tuning.mode_counts
    assert (ran.argmax(1) == [Mode.NONE, Mode.DA, Mode.NONE]).all()
    assert request.output == expected("v32", 130, 3)
    assert eng.tuning.kept == ((Mode.NONE, Mode.DA, Mode.NONE),)


def test_at_most_three_vectors_are_kept():
    tuning = engine("v32", modes="layerwise").tuning
    vectors = [(mode, other, Mode.NONE) for mode in (1, 2) for other in (1, 2)]
    for vector in (*vectors, vectors[2]):
        tuning._keep(vector)
    assert tuning.kept == (vectors[1], vectors[3], vectors[2])
