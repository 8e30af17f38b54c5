"""The slice of a large worker at small sizes: run by `test_pretended_steps`."""

from __future__ import annotations

import pytest

from ess.bench.worker.one_gpu import OFFLOAD, RESIDENT, fits, slice_benchmark, taken, true_plan
from ess.bench.worker.random_model import weight_bytes
from tests.device.measured import unexpected

pytestmark = pytest.mark.usefixtures("alone")


def test_both_ways_say_the_same():
    resident, offload, predicted, missed = rows = list(slice_benchmark(smoke=True))
    assert unexpected(rows) == []
    assert resident["name"] == "slice: resident"
    assert offload["config"]["same_text"] == "2/2"
    assert offload["config"]["slots_each"] < resident["config"]["slots_each"]
    assert missed["value"] > 0
    assert [row["config"]["kind"] for row in (offload, predicted)] == ["measured", "predicted"]
    assert predicted["ratio"] == pytest.approx(offload["ratio"])


@pytest.mark.parametrize("gib", [79, 139])
def test_a_true_worker_fits_an_h100_and_an_h200(gib):
    plan, device_bytes = true_plan(), gib << 30
    room = 0.9 * device_bytes - weight_bytes(plan.worker)
    batches = {name: fits(plan, plan.way(name), room) for name in (RESIDENT, OFFLOAD)}
    assert 3 * batches[RESIDENT] < batches[OFFLOAD]
    for name, batch in batches.items():
        way = plan.way(name)
        assert taken(plan, way, batch) <= room < taken(plan, way, batch + 1)
