"""`ess-bench prefill` in small: that its arms run, and that its rows say what they measure."""

from __future__ import annotations

import importlib.util

import pytest

from ess.bench.prefill.tier import prefill_benchmark

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_trials", "forked_servers")]


def test_every_arm_has_its_rows():
    rows = {row.name: row for row in prefill_benchmark(smoke=True)}
    bubbles = rows["PP2 on the virtual clock, bubble share"]
    assert bubbles.baseline == "(P - 1) / (P - 1 + M)"
    assert bubbles.baseline_value == pytest.approx(1 / 6)
    assert 0 < bubbles.value < 1
    assert rows["PP2 on the virtual clock, first token, predicted"].target == 0.95
    assert rows["PP2, 640 tokens, slow links, wall clock"].baseline == "synchronous sends"
    calculated = [row for name, row in rows.items() if name.endswith("CALCULATED")]
    assert [row.config["times"] for row in calculated] == ["fitted, measured up to 640 tokens"]
    peak = rows["peak memory without pools, stage 1, 640 tokens"]
    assert peak.config["whole_mb"] == pytest.approx(peak.value + peak.config["pools_mb"], abs=0.2)


def test_a_second_turn_runs_fewer_chunks():
    rows = {row.name: row for row in prefill_benchmark(smoke=True, turns=True)}
    assert rows["PP2, 640 tokens, chunks of a second turn"].ratio == 2
    assert rows["PP2, 640 tokens, second turn from host"].config["cached"] == 512
    assert "ess serve, 640 tokens, second turn after a restart, from disk" in rows


@pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="no router is installed")
def test_rows_are_handed_over_behind_a_router():
    rows = {row.name: row for row in prefill_benchmark(smoke=True, serving=True, router="smg")}
    first = rows["PP2 x 2 decode, first token, p99"]
    assert first.baseline == "one ess serve"
    assert first.config["handoffs"] == "2 landed, 0 missed"
