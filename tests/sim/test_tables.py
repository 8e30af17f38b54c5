from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.sim.decode_step import Scenario, simulate
from ess.sim.locality import misses
from ess.sim.operators.gpus import silicon_of
from ess.sim.operators.paper import Tables
from ess.sim.operators.tables import FOLDER, Curve, Surface


def test_curves_interpolate_extrapolate_and_never_go_below_a_launch():
    curve = Curve((1.0, 2.0, 4.0), (10.0, 20.0, 30.0))
    assert [curve.at(size) for size in (0.5, 1, 1.5, 3, 4, 6)] == [10, 10, 15, 25, 30, 40]


def test_surfaces_agree_with_their_points():
    surface = Surface((1.0, 3.0), (Curve((1.0, 2.0), (1.0, 2.0)), Curve((1.0, 2.0), (5.0, 9.0))))
    assert surface.at(1, 1) == 1.0
    assert surface.at(2, 3) == 9.0
    assert surface.at(1.5, 2) == pytest.approx((1.5 + 7.0) / 2)


def test_shipped_tables_hold_what_was_measured():
    shipped = Tables.shipped()
    assert shipped.attention.at(128, 131_072) == pytest.approx(1088, abs=1)
    assert shipped.attention.at(16, 32_768) == pytest.approx(279, abs=1)
    assert shipped.experts[32, "uniform"].at(4096) == pytest.approx(124.2)
    assert [way.at(128) for way in shipped.exchange[4]] == [143.0, 263.3]
    assert shipped.gemm[7168, 16_384].at(128) == pytest.approx(59.7)


def test_an_h100_is_an_h200_with_slower_memory():
    """Its indexer scans slower, its experts read slower; where kernels compute it is no other."""
    both = [silicon_of(gpu, family="deepseek-v3.2") for gpu in ("h100", "h200")]
    slow, fast = (operators.bank for operators in both)
    growth = slow.index_growth["deepseek-v3.2",]
    assert growth.at(128, 131_072) == pytest.approx(1395, abs=1)
    assert growth.at(128, 32_768) == pytest.approx(718, abs=1)
    slower, faster = (bank.wide_experts[32, "uniform"].at(1024) for bank in (slow, fast))
    assert slower > 1.1 * faster
    asked = Scenario(batch=20, queries_each=2, context=131_072)
    steps = [simulate(operators, asked).step_us for operators in both]
    assert 1.0 < steps[0] / steps[1] < 4.8 / 3.35


def test_shipped_tables_are_read_once():
    first, second = (silicon_of("h200", family=name) for name in ("deepseek-v3.2", "glm-5.2"))
    assert first.bank is second.bank
    other = silicon_of("h200", family="deepseek-v3.2", stack="vllm")
    assert other.bank.lender is first.bank


def test_shipped_tables_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("?[12]00/*")) < 1_500_000


def test_a_package_that_is_not_one_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="unpack the package"):
        silicon_of("h200", family="deepseek-v3.2", package=tmp_path).bank.read("products")


def test_misses_at_published_points():
    curves = misses.published()
    assert curves.mean(context=32_768, slots=0.2 * 32_768) == pytest.approx(190)
    assert curves.mean(context=131_072, slots=0.1 * 131_072) == pytest.approx(137)
    layers = curves.layers(context=32_768, slots=6553.6, queries_each=2)
    assert sum(layers) / 61 == pytest.approx(190, rel=1e-3)
    assert max(range(61), key=layers.__getitem__) == 17
    assert layers[17] == pytest.approx(605 * 190 / 182.54, rel=1e-3)


@pytest.mark.parametrize("context", [8192, 32_768, 50_000, 131_072, 1_000_000])
def test_more_slots_never_miss_more_and_all_slots_miss_nothing(context: int):
    curves = misses.published()
    counts = [curves.mean(context=context, slots=context * part / 50) for part in range(1, 51)]
    assert counts[-1] == 0.0
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(counts))


@pytest.mark.parametrize("context", [1000, 32_768, 131_072])
@pytest.mark.parametrize("queries", [1, 2, 4])
def test_a_layer_misses_at_most_what_its_queries_select(context: int, queries: int):
    """Down to slots that hold next to nothing, where the published curves are only carried on."""
    curves = misses.published()
    for slots in (context // 500, context // 50, context // 10, context // 2):
        layers = curves.layers(context=context, slots=slots, queries_each=queries)
        assert len(layers) == 61
        assert 0 < min(layers) <= max(layers) <= min(queries * 2048, context)
    starved = curves.layers(context=32_768, slots=64, queries_each=queries)
    assert max(starved) == queries * 2048
