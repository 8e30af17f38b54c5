"""Benchmarks of an engine on the pretended device: that they run, not what they measure."""

from __future__ import annotations

import pytest

from ess.bench.engine.device_step import device_step_benchmark
from ess.bench.engine.step import step_benchmark
from ess.errors import BadInput
from tests.device.measured import unexpected

pytestmark = pytest.mark.usefixtures("alone")


def test_all_ways_say_the_same_on_a_device():
    rows = device_step_benchmark(smoke=True)
    assert unexpected(rows) == []
    whole, rate, *others = rows[1:]
    assert (whole["name"], whole["unit"]) == ("a step, RESIDENT", "ms")
    assert (rate["name"], rate["baseline"]) == ("decode, DA at 0.5", "RESIDENT")
    assert rate["config"]["same_text"] == "1/1"
    for row in (whole, rate):
        assert (row["config"]["kind"], row["config"]["device"]) == ("measured", "emulated")
    assert rate["config"]["layers_ran"].keys() == {"DA"}
    assert any(row["unit"] == "rows" and row["value"] > 0 for row in others)


@pytest.mark.parametrize("asked", [{"stages": True}, {"arrivals": 8}])
def test_what_the_host_alone_measures_is_refused(asked):
    with pytest.raises(BadInput, match="--device cuda: stages and arrivals"):
        step_benchmark(device="cuda", **asked)
