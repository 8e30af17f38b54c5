"""The benchmarks of decode speed: they measure what they say, on something small."""

from __future__ import annotations

import pytest
import torch

from ess.bench.engine import overhead
from ess.bench.engine.loop import loop_benchmark
from ess.kernels.cpu import stage
from tests.support.built import needs_native

pytestmark = needs_native


def test_the_meter_sees_a_stage_and_leaves_its_result_alone() -> None:
    one, weight = stage.Stage(), stage.pack(torch.randn(64, 64))
    normed = one.norm(one.take(64), torch.ones(64), 1e-6)
    one.give(one.linear(normed, weight), torch.float32)
    x = torch.randn(9, 64)
    [plain] = one([x])
    meter = overhead.Meter()
    with meter.reading(twice=True):
        [metered] = one([x])
    assert torch.equal(plain, metered)
    assert set(meter.ns) == {"stages", "again", "products"}
    assert meter.ns["products"] > 0
    [after] = one([x])
    assert torch.equal(plain, after)


def test_the_loop_in_small() -> None:
    """A turn without all its tokens, or a request that ends, would be refused."""
    [row] = loop_benchmark(smoke=True)
    assert (row.config["batch"], row.config["layers"], len(row.samples)) == (2, 4, 4)
    assert min(row.samples) > 0


@pytest.mark.slow
def test_overhead_in_small() -> None:
    rows = overhead.overhead_benchmark(smoke=True)
    shares = [row.value for row in rows if row.name.startswith("overhead")]
    assert len(shares) == 4
    assert all(0 < share < 100 for share in shares)


@pytest.mark.slow
def test_transformers_in_small() -> None:
    pytest.importorskip("transformers", reason="extra `oracle` is not installed")
    from ess.bench.engine import vs_transformers

    rows = vs_transformers.vs_transformers_benchmark(smoke=True)
    assert [row.name.split(",")[0] for row in rows[1:]] == ["decode", "decode"]
    assert rows[0].value < vs_transformers.AGREES
