"""Chunked pipeline prefill: closed forms, limits, and the published rows."""

from __future__ import annotations

import pytest

from ess.engine.chunking.sizes import Chunking, PrefillTime
from ess.errors import BadInput
from ess.sim.prefill import published_rows
from ess.sim.prefill.pipeline import Pipeline, chunked, prefill

TIME = PrefillTime(quadratic=2e-9, linear=5e-5)
EVEN = Pipeline.of_layers(layers=60, stages=4)


def test_one_stage_takes_the_whole_time_and_never_waits() -> None:
    alone = prefill(TIME, Pipeline(shares=(1.0,)), [1000, 500, 2000])
    assert alone.ttft_s == pytest.approx(TIME.of(3500))
    assert alone.bubble_share == pytest.approx(0)


def test_one_chunk_passes_all_stages_one_after_another() -> None:
    single = prefill(TIME, EVEN, [4000])
    assert single.ttft_s == pytest.approx(TIME.of(4000))
    assert single.bubble_share == pytest.approx(3 / 4)


def test_equal_chunks_have_the_textbook_bubble() -> None:
    """(P - 1) / (P - 1 + M), with chunks so cut that all take the same time."""
    nearly_linear = PrefillTime(quadratic=1e-18, linear=1e-3)
    many = prefill(nearly_linear, EVEN, [64] * 13)
    assert many.bubble_share == pytest.approx(3 / (3 + 13), rel=1e-6)


def test_equal_stages_wait_for_the_longest_chunk() -> None:
    """A flow shop with equal stages: all chunks once, the longest P - 1 times more."""
    sizes = [100, 900, 300, 50, 700]
    done, times = 0, []
    for size in sizes:
        times.append(TIME.of(size, after=done) / 4)
        done += size
    assert prefill(TIME, EVEN, sizes).ttft_s == pytest.approx(sum(times) + 3 * max(times))


def test_overhead_is_paid_per_chunk_and_stage_and_hiding_ends_at_busy() -> None:
    slow = Pipeline(shares=EVEN.shares, chunk_overhead_s=0.5)
    sizes = [1000] * 6
    plain, heavy = prefill(TIME, EVEN, sizes), prefill(TIME, slow, sizes)
    assert heavy.busy_s == pytest.approx(plain.busy_s + 6 * 0.5)
    assert heavy.ttft_s == pytest.approx(plain.ttft_s + 9 * 0.5)
    assert heavy.seconds_per_request(hidden=0) == heavy.ttft_s
    assert heavy.seconds_per_request(hidden=1) == pytest.approx(heavy.busy_s)


def test_later_stages_take_the_spare_layers() -> None:
    counts = [round(share * 61) for share in Pipeline.of_layers(layers=61, stages=4).shares]
    assert counts == [15, 15, 15, 16]


def test_shrinking_chunks_beat_equal_ones_on_a_steep_curve() -> None:
    steep = PrefillTime(quadratic=1e-8, linear=1e-6)
    static, dynamic = (
        chunked(steep, EVEN, Chunking(first=8192, context=65_536, smoothing=s), prompt=65_536)
        for s in (0.0, 1.0)
    )
    assert dynamic.ttft_s < 0.9 * static.ttft_s
    assert len(dynamic.chunk_sizes) > len(static.chunk_sizes)


def test_the_published_rows() -> None:
    """Static rows are met by the fit; of the others, those that were reached stay reached."""
    rows = published_rows.predictions()
    errors = {row.name: row.error for row in rows if not row.fitted}
    fitted = [row for row in rows if row.fitted]
    assert all(abs(row.error) < 1e-3 for row in fitted)
    deepseek = [error for name, error in errors.items() if name.startswith("DeepSeek")]
    assert len(deepseek) == 2
    assert max(map(abs, deepseek)) < 0.05
    assert sum(abs(error) < 0.05 for error in errors.values()) >= 5
    assert max(map(abs, errors.values())) < 0.08


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Pipeline(shares=()), "shares"),
        (lambda: Pipeline(shares=(0.5, 0.6)), "add up to 1"),
        (lambda: Pipeline(shares=(1.0,), chunk_overhead_s=-1), "negative"),
        (lambda: Pipeline.of_layers(layers=3, stages=4), "4 stages for 3 layers"),
        (lambda: prefill(TIME, EVEN, [64]).seconds_per_request(hidden=2), "hidden 2"),
    ],
)
def test_what_cannot_be_is_refused(make, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        make()
