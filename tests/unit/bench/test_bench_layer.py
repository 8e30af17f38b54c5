"""The pure parts of the one-layer benchmark: residency, layout, and rows made of samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.bench.gpu import layer_points
from ess.bench.gpu.layer import layer_benchmark, rows_of
from ess.bench.gpu.layer_points import Point, Residency, draw, halves, lay_out, points
from ess.errors import BadInput, Unavailable

SMALL = Point(batch=5, queries=2, context=6000, slots=4200)


def test_residency_is_lru() -> None:
    """One position a step, so that no two are equally old."""
    positions = np.random.default_rng(0).integers(0, 60, 500)
    residency, order = Residency(context=60, slots=25), []
    for position in positions.tolist():
        step = residency.step(np.array([[position]], np.int32))
        assert bool(step.missing[0, 0]) == (position not in order)
        order = [*[each for each in order if each != position][-24:], position]


def test_what_is_held_is_what_is_named() -> None:
    rng = np.random.default_rng(0)
    residency, held = Residency(context=60, slots=25), np.full(25, -1)
    for _ in range(200):
        selection = rng.integers(-1, 60, (2, 9)).astype(np.int32)
        step = residency.step(selection)
        before = set(held[held >= 0])
        held[step.fetched_slots] = step.fetched_positions
        assert set(step.fetched_positions) == set(selection[step.missing])
        assert not before & set(step.fetched_positions)
        is_any = selection >= 0
        assert np.array_equal(step.slots >= 0, is_any)
        assert np.array_equal(held[step.slots[is_any]], selection[is_any])


def test_a_batch_is_its_requests_side_by_side() -> None:
    steps = draw(SMALL)
    batch = lay_out(SMALL, steps, host_row_count=20_000)
    assert batch.whole.shape == (10, 2048)
    assert len(np.unique(batch.target_slots)) == len(batch.target_slots)
    assert batch.fetch_starts[-1] == len(batch.host_rows) == len(batch.target_slots)
    assert batch.host_rows.max() < 20_000
    for request in range(5):
        mine = slice(2 * request, 2 * request + 2)
        low, high = request * SMALL.slots, (request + 1) * SMALL.slots
        assert batch.whole[mine].min() >= low
        assert batch.whole[mine].max() < high
        copies = batch.fetch_of(range(request, request + 1))
        named = set(batch.fetched[mine][batch.fetched[mine] >= 0])
        assert named == set(batch.target_slots[copies])
        step = steps[request % len(steps)]
        assert np.array_equal(batch.resident[mine] == -1, step.missing)
    apart = (batch.resident == -1) ^ (batch.fetched == -1)
    assert apart.all()
    assert np.array_equal(np.maximum(batch.resident, batch.fetched), batch.whole)
    assert batch.misses_mean == len(batch.host_rows) / 5


def test_misses_are_those_of_the_recipe() -> None:
    """32K with a fifth in slots and two tokens verified: 190 published, 165 by the generator."""
    point = Point(batch=2, queries=2, context=32_768, slots=6554)
    misses = [len(step.fetched_slots) for step in draw(point)]
    assert 80 < np.mean(misses) < 330


def test_points_and_parts() -> None:
    everything = list(points(smoke=False))
    assert len(everything) == 5 * 3 * 2
    assert {(p.batch, p.queries, p.context) for p in everything} >= {
        (160, 4, 131_072),
        (1, 1, 32_768),
    }
    assert len(list(points(smoke=True))) == 1
    assert halves(5, 2) == [range(3), range(3, 5)]
    assert halves(1, 2) == [range(1)]
    with pytest.raises(BadInput, match="needs slots for 2048 rows"):
        Point(batch=1, queries=2, context=9000, slots=4000)
    assert layer_points.HOST_ROWS_MAX * 656 < 3 << 30


def test_rows_say_what_is_exposed_and_what_disturbs() -> None:
    batch = lay_out(SMALL, draw(SMALL), host_row_count=20_000)
    times = {
        "resident": 100.0, "none": 141.0, "da": 105.0, "dba": 99.0, "copy": 40.0,
        "attend 0": 52.0, "attend 0 on the whole device": 50.0, "attend 0 while copies run": 60.0,
        "attend 0 and copy": 55.0, "attend all": 55.0, "attend 1": 9.0,
        "merge": 3.0, "attend twice": 66.0, "attend twice and merge": 110.0,
    }  # fmt: skip
    rows = {row["name"]: row for row in rows_of(SMALL, batch, {n: [t] for n, t in times.items()})}
    assert rows["layer: exposed by none"]["value"] == 41
    assert rows["layer: exposed by none"]["met"] is None
    assert rows["layer: exposed by da"]["value"] == 5
    assert rows["layer: exposed by da"]["ratio"] == 8
    assert rows["layer: exposed by da"]["met"]
    assert rows["layer: exposed by dba"]["value"] == pytest.approx(0.1)
    assert rows["layer: attend 0 beside the copy"]["ratio"] == pytest.approx(50 / 60)
    assert not rows["layer: attend 0 beside the copy"]["met"]
    assert rows["layer: attend twice, cost"]["ratio"] == pytest.approx(55 / 66)
    assert rows["layer: attend twice and merge, cost"]["ratio"] == 0.5
    rate = rows["layer: copy rate"]["value"]
    assert rate == pytest.approx(len(batch.host_rows) * 656 / 40e-6 / 1e9)
    assert rows["layer: merge"]["config"]["misses"] == round(batch.misses_mean, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(Unavailable, match="cuda"):
        list(layer_benchmark(smoke=True))
