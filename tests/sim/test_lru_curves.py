"""Misses counted in the product's planner, beside the published curves."""

from __future__ import annotations

import json
import statistics

import pytest

from ess.errors import BadInput
from ess.server.commands.cli import main
from ess.sim.locality import misses
from ess.sim.locality.lru_curves import Drawing, agreement, lru_curves, sampled_layers


@pytest.mark.slow
def test_counted_misses_are_the_published_ones_at_32k():
    """At 32K, where the generator was fitted: within 20 % on average, and they fall with slots."""
    published = misses.published()
    counted = lru_curves(published, Drawing(contexts=(32_768,), steps=64, skip=24))
    points = agreement(counted, published)
    assert [point.ratio for point in points] == [0.1, 0.2, 0.3, 0.5, 0.9]
    errors = [abs(point.lru / point.published - 1.0) for point in points]
    assert statistics.mean(errors) < 0.2
    at = [counted.mean(context=32_768, slots=slots) for slots in range(2048, 32_768, 2048)]
    assert at == sorted(at, reverse=True)


def test_more_queries_miss_more_in_a_step_but_less_each():
    published = misses.published()
    small = {"contexts": (8192,), "ratios": (0.4, 0.8), "layers": 2, "steps": 32, "skip": 12}
    single, four = (
        lru_curves(published, Drawing(queries_each=queries, **small)).mean(
            context=8192, slots=0.4 * 8192
        )
        for queries in (1, 4)
    )
    assert single / 2 < 4 * four / 2 < 4 * single


def test_layers_are_spread_over_all():
    assert len(set(sampled_layers(61))) == 61
    assert len(set(sampled_layers(10))) == 10
    with pytest.raises(BadInput, match="62 layers"):
        sampled_layers(62)
    with pytest.raises(BadInput, match="skip 5 of 5"):
        Drawing(steps=5, skip=5)
    with pytest.raises(BadInput, match="two ratios"):
        Drawing(ratios=(0.5,))


@pytest.mark.slow
def test_the_command_counts_and_says_how_well_it_agrees(capsys: pytest.CaptureFixture[str]):
    asked = ["sim", "--rate", "4", "--requests", "80", "--ctx", "128k", "--prefill", "64x8"]
    assert main([*asked, "--misses", "lru", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["agreed"]) == 10
    assert all(0.8 < point["lru"] / point["published"] < 1.25 for point in document["agreed"])
    assert document["offload"]["misses_mean"] > 50
    assert document["resident"]["misses_mean"] == 0
