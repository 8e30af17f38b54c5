"""What is reached of the published results, and by name what is not: no silent change."""

from __future__ import annotations

import json

import pytest

from ess.bench.harness.report import Row
from ess.bench.paper.published import paper_benchmark
from ess.sim import fit_constants
from ess.sim.operators.paper import FITTED_FILE, PaperOperators

MISSED = {
    ("gain 128K", None),
    ("gain of offload after MTP", None),
    ("fig. 1 throughput", None),
    ("fig. 7 DA", 128),
    ("fig. 7 DA", 256),
    ("fig. 7 DBA", 32),
    ("fig. 7 DBA", 512),
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return paper_benchmark(smoke=True)


def named(rows: list[Row], name: str) -> list[Row]:
    return [row for row in rows if row.name == name]


def test_every_fact_is_there_once_and_only_the_known_ones_miss(rows: list[Row]):
    assert len(named(rows, "table 2 throughput")) == 13
    assert len(named(rows, "fig. 1 throughput")) == 23
    assert len(named(rows, "table 2 batch") + named(rows, "table 2 slot ratio")) == 8
    assert len([row for row in rows if row.name.startswith("fig. 7")]) == 15
    missed = {(row.name, row.config.get("misses")) for row in rows if row.met is False}
    assert missed == MISSED


def test_a_kind_of_rows_has_one_tolerance(rows: list[Row]):
    targets = {(row.config["kind"], row.target) for row in rows if row.config.get("kind")}
    kinds = ("capacity", "throughput")
    assert {kind: target for kind, target in targets if kind in kinds} == {
        "capacity": 1.0,
        "throughput": 0.95,
    }
    overhead = [row for row in rows if row.config.get("kind") == "overhead"]
    assert all((row.target or 0) <= 0.85 for row in overhead)


def test_batches_and_ratios_are_exact(rows: list[Row]):
    for row in named(rows, "table 2 batch") + named(rows, "table 2 slot ratio"):
        assert row.value == row.baseline_value, row


def test_throughput_within_five_per_cent_each_and_three_on_average(rows: list[Row]):
    assert min(row.ratio or 0 for row in named(rows, "table 2 throughput")) >= 0.95
    assert named(rows, "table 2 mean agreement, held out")[0].value >= 0.97


def test_the_missed_gains_are_within_eleven_points(rows: list[Row]):
    for row in rows:
        if row.name.startswith("gain"):
            assert abs(row.value - (row.baseline_value or 0)) < 0.11, row


def test_scores_count_what_nothing_was_chosen_on(rows: list[Row]):
    scores = {
        row.name: (row.value, row.baseline_value) for row in rows if "held out and" in row.name
    }
    assert scores == {
        "held out and met: capacity": (0, 0),
        "held out and met: throughput": (11, 11),
        "held out and met: gain": (4, 6),
        "held out and met: overhead": (6, 10),
    }


def test_what_other_misses_would_score_is_said(rows: list[Row]):
    """Throughputs and gains can hardly tell true misses from none: only double ones are refused."""
    scores = {row.name: row.value for row in rows if "the misses, met" in row.name}
    assert list(scores) == [f"with {factor} x the misses, met" for factor in ("0", "0.5", "1", "2")]
    assert scores["with 0 x the misses, met"] >= scores["with 1 x the misses, met"] - 1
    assert scores["with 2 x the misses, met"] < scores["with 1 x the misses, met"]


def test_the_constants_are_the_fitted_ones_and_no_offload_row_took_part():
    document = json.loads(FITTED_FILE.read_text())
    asked = fit_constants.targets()
    assert all(target.scenario.misses is None for target in asked)
    assert list(document["rows"]) == [target.name for target in asked]
    assert document["candidates"][0]["fitted"] == document["constants"]
    errors = fit_constants.relative_errors(PaperOperators(), asked)
    assert [round(float(error), 4) for error in errors] == list(document["rows"].values())
