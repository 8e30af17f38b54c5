"""`ess-bench handoff` in small: that its arms run, and that its rows say what they measure."""

from __future__ import annotations

import pytest

from ess.bench.handoff.handoff import handoff_benchmark


@pytest.mark.slow
@pytest.mark.usefixtures("forked_servers")
def test_every_arm_has_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row.name: row for row in handoff_benchmark(smoke=True)}
    told = capsys.readouterr().err
    for arm in (
        "64 pages",
        "GLM-5-next, its state",
        "landings",
        "misses",
        "a prefill and a decode",
    ):
        assert arm in told
    assert rows["pages by tcp"].baseline == "plain socket"
    assert rows["GLM-5-next: its state by shared"].value > 0
    assert rows["640 tokens: prompt's end to first token, layer by layer"].value > 0
    hidden = rows["640 tokens: the link's time that is hidden"]
    assert hidden.value <= 1
    assert hidden.config["MB"] > 1
    carried = rows["misses in the first step after a handoff, windows carried"]
    assert carried.value < (carried.baseline_value or 0), "windows make the first step warm"
    assert rows["1p1d, throughput"].baseline == "two that do both"
