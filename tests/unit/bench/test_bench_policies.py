"""The benchmark's own parts: closeness, recorded traces through the command, and campaigns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ess import console
from ess.bench import cli
from ess.bench.harness.output.agreement import agreement
from ess.bench.locality import lru_bruteforce, policies, replay
from ess.pool.lru.eviction import scored
from ess.sim.locality import laboratory
from ess.sim.locality.oracles import Min, next_uses
from ess.sim.locality.policies import PlannerArena
from ess.sim.locality.selections import LayerProfile, RequestLoad
from ess.sim.locality.workloads import generated, write_trace
from ess.trace import RequestStep, TraceHeader, TraceWriter
from tests.support.few import few


@pytest.mark.parametrize(("ours", "met"), [(100, True), (110, True), (90, True), (89, False)])
def test_agreement_is_met_inside_the_tolerance(ours: float, met: bool) -> None:
    row = agreement(name="x", unit="rows", ours=ours, published=("paper", 100), tolerance=0.1)
    assert (row.met, row.target) == (met, 0.9)
    assert row.ratio is not None
    assert row.ratio <= 1
    assert row.config["error"] == f"{ours - 100:+.1f}%"
    free = agreement(name="x", unit="rows", ours=ours, published=("paper", 100))
    assert (free.met, free.target) == (None, None)


def test_a_written_trace_replays_to_the_same_misses(tmp_path: Path) -> None:
    row = replay.replay_row(tmp_path / "t")
    assert row.met
    assert row.value > 0


def test_the_small_comparisons_with_brute_force_are_exact() -> None:
    assert [row.met for row in policies.brute_rows()] == [True] * 4


def test_a_recorded_trace_through_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = RequestLoad(context=2000, step_count=40, query_count=2, top_k=64, seed=1)
    profiles = [LayerProfile(hot=200, cold=3), LayerProfile(hot=400, cold=6)]
    write_trace(tmp_path / "t", load, profiles, layout="x")
    assert cli.main(["policies", "--json", "--trace", str(tmp_path / "t")]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    by_name = {
        (row["name"], row["config"].get("group"), row["config"].get("slots")): row for row in rows
    }
    slots = sorted({row["config"]["slots"] for row in rows if "slots" in row["config"]})
    assert slots == [128, 192, 256], "1.5, 2, 3 and 4 times 64, in blocks of 64"
    for group in (0, 1):
        for count in slots:
            least = by_name.get(("misses per step, min with bypass warmed", group, count))
            if least is not None:
                assert least["ratio"] >= 1, "no policy beats MIN"
            exact = by_name.get(("misses per step, exact curve from cold", group, count))
            if exact is not None:
                cold = by_name["misses per step, lru from cold", group, count]
                assert cold["value"] == pytest.approx(exact["value"], rel=0.05)
    assert ("inter-layer similarity", 1, None) in by_name


def test_a_scored_trace_compares_the_policies_of_the_pool_in_multiples_of_top_k(
    tmp_path: Path,
) -> None:
    rng, level = np.random.default_rng(2), np.linspace(0, 1, 640)
    header = TraceHeader(
        layout="x", group_count=1, top_k=64, mtp=1, context=640, scored=True, metadata={}
    )
    with TraceWriter(tmp_path / "t", header=header) as writer:
        for number in range(60):
            logits = (level + rng.normal(0, 0.2, 640)).astype(np.float32)[: 580 + number]
            chosen = np.sort(np.argsort(-logits)[:64]).astype(np.int32)
            scores = scored(logits, chosen).astype(np.uint8)
            writer.write_group(0, chosen[None], scores=scores[None])
            entry = RequestStep(request=0, length=579 + number, query_count=1, accepted=1)
            writer.commit_step(number, [entry])
    over = {
        (row.name.rsplit(" ", 1)[1], row.config["slots"]): row.value
        for row in replay.recorded_rows(tmp_path / "t")
        if row.name.startswith("misses over MIN")
    }
    assert {slots for _, slots in over} == {128, 192, 256}, "1.5, 2, 3 and 4 times 64, in blocks"
    assert all(over["score", slots] < over["lru", slots] for slots in (128, 192, 256))
    assert min(over.values()) >= 1


def test_a_trace_that_was_never_closed_is_read_if_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, load = tmp_path / "t", RequestLoad(context=256, step_count=20, top_k=8, seed=3)
    write_trace(path, load, [LayerProfile(hot=40, cold=2)], layout="x")
    path.write_bytes(path.read_bytes()[:-50])
    told = ["policies", "--trace", str(path), "--format", "csv"]
    assert cli.main(told) == console.USAGE
    assert "--recover of ess-bench policies" in capsys.readouterr().err
    assert cli.main([*told, "--recover"]) == console.OK
    seen = capsys.readouterr()
    assert "misses" in seen.out
    assert "bytes behind them are left out" in seen.err
    assert cli.main(["policies", "--recover"]) == console.USAGE
    assert "give --trace FILE too" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(3), all_of=range(12)))
def test_campaign_planner_lru_is_the_lru_of_a_dictionary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = RequestLoad(
        context=int(rng.integers(100, 900)),
        step_count=300,
        query_count=int(rng.integers(1, 4)),
        top_k=int(rng.integers(8, 48)),
        recent=int(rng.integers(0, 8)),
        seed=seed,
    )
    profile = LayerProfile(hot=int(rng.integers(30, 100)), cold=int(rng.integers(0, 8)), drift=1.0)
    workload = generated(load, profile)
    for slots in (64, 128, 256):
        arena = PlannerArena(workload, slots=slots, top_k=load.top_k)
        misses = laboratory.run(workload, {"lru": arena})["lru"].misses
        assert misses == lru_bruteforce.lru_misses(workload, slots=slots)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(6), all_of=range(30)))
def test_campaign_min_is_optimal_by_exhaustive_search(seed: int) -> None:
    load = RequestLoad(context=7, step_count=8, top_k=3, seed=seed)
    workload = generated(load, replace(LayerProfile(), hot=6, cold=1, drift=0.3))
    for bypass in (False, True):
        policy = Min(workload, slots=5, future=next_uses(workload), bypass=bypass)
        misses = sum(laboratory.run(workload, {"min": policy})["min"].misses)
        assert misses == lru_bruteforce.fewest_misses(workload, slots=5, bypass=bypass)


@pytest.mark.slow
def test_campaign_the_smoke_benchmark_meets_what_it_can(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the budgets on curves with a cliff miss their target; docs/log.md says why."""
    missed = [row for row in policies.policies_benchmark(smoke=True) if row.met is False]
    assert {row.name for row in missed} == {"misses per layer and step, divided budgets"}
    assert {row.config["curves"] for row in missed} == {"generated", "law bent to the mean at 0.1"}
    told = capsys.readouterr().err
    assert "curve of layer 17, context 32,768" in told
    assert "every policy, 6,528 slots" in told
