"""What is made of measured times of chunks: the fit, and settings that are searched with it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from ess.bench.paper.prefill import exhaustive_s
from ess.engine.chunking.sizes import Chunking, PrefillTime, chunks
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim.prefill.measured import MeasuredChunk, Model, modelled
from ess.sim.prefill.pipeline import prefill
from ess.sim.prefill.tuning import (
    Setting,
    best_dynamic,
    best_static,
    on_clock,
    search,
)

TIME = PrefillTime(quadratic=9e-9, linear=2.9e-4)
OVERHEAD_S = 0.004
SHARES = (0.13, 0.14, 0.14, 0.14, 0.14, 0.14, 0.17)
HALVES = ((0, 3), (3, 6))


def run_of(size: int, prompt: int, slow=lambda: 1.0) -> list[MeasuredChunk]:
    made = []
    for done in range(0, prompt, size):
        count = min(size, prompt - done)
        seconds = (TIME.of(count, after=done) + OVERHEAD_S) * slow()
        made.append(MeasuredChunk(done, count, tuple(share * seconds for share in SHARES)))
    return made


def known() -> Model:
    return Model(time=TIME, overhead_s=OVERHEAD_S, shares=SHARES, error=0.0, is_flat=False)


def test_exact_times_are_found_again():
    model = modelled([each for size in (256, 512, 1024) for each in run_of(size, 4095)])
    assert model.time.quadratic == pytest.approx(TIME.quadratic, rel=1e-4)
    assert model.time.linear == pytest.approx(TIME.linear, rel=1e-4)
    assert model.overhead_s == pytest.approx(OVERHEAD_S, rel=1e-3)
    assert model.shares == pytest.approx(SHARES)
    assert model.error < 1e-4
    assert not model.is_flat


def test_a_few_stalls_do_not_move_the_fit():
    draw = random.Random(1)

    def slow() -> float:
        return 5.0 if draw.random() < 0.08 else draw.uniform(0.98, 1.02)

    model = modelled([each for size in (256, 512, 1024) for each in run_of(size, 8191, slow)])
    for done, count in ((0, 512), (4096, 512), (7000, 1024)):
        assert model.seconds(done, count) == pytest.approx(
            TIME.of(count, after=done) + OVERHEAD_S, rel=0.08
        )


@pytest.mark.parametrize("seed", range(20))
def test_chunks_of_nearly_one_size_do_not_blow_up_the_fit(seed: int):
    """A constant and a linear term cannot be told apart there: neither may be below 0."""
    draw = random.Random(seed)
    seen = run_of(128, 639, lambda: draw.uniform(0.5, 2.0))
    model = modelled(seen)
    assert model.time.linear >= 0
    assert model.overhead_s >= 0
    for each in seen:
        assert 0.2 < model.seconds(each.done, each.count) / each.seconds < 5


def test_without_growth_it_is_flat():
    seen = [MeasuredChunk(done, 512, (0.1,)) for done in range(0, 4096, 512)]
    model = modelled(seen)
    assert model.is_flat
    assert model.seconds(1 << 20, 512) == pytest.approx(0.1, rel=0.05)


def test_no_chunks_or_chunks_of_different_layers_are_refused():
    with pytest.raises(BadInput, match="0 chunks"):
        modelled([])
    with pytest.raises(BadInput, match="same layers"):
        modelled([MeasuredChunk(0, 64, (1.0,)), MeasuredChunk(64, 64, (1.0, 2.0))])
    with pytest.raises(BadInput, match="took no time"):
        modelled([MeasuredChunk(0, 64, (0.0,))])


def test_mtp_is_with_the_last_stage():
    shares = known().stage_shares(HALVES)
    assert shares == pytest.approx((0.41, 0.59))
    seconds = known().stage_s(HALVES, [512, 512])
    assert [sum(times) for times in seconds] == pytest.approx(
        [known().seconds(0, 512), known().seconds(512, 512)]
    )


def test_the_clock_and_the_simulator_agree():
    sizes = [512] * 8
    clocked_s = on_clock(known().stage_s(HALVES, sizes)).span_s
    predicted = prefill(TIME, known().pipeline(HALVES), sizes).ttft_s
    assert predicted == pytest.approx(clocked_s, rel=0.01)


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize("overhead_s", [0.0, 0.02, 0.2])
def test_what_is_found_is_within_a_hundredth_of_the_best_of_all(stages: int, overhead_s: float):
    whole = replace(known(), shares=(1 / stages,) * stages, overhead_s=overhead_s * stages)
    layers = tuple(itertools.pairwise(range(stages + 1)))
    static, dynamic = (
        best(whole, layers, 32_768, chunk_max=32_768) for best in (best_static, best_dynamic)
    )
    assert (static.is_dynamic, dynamic.is_dynamic) == (False, True)
    pipeline = whole.pipeline(layers)
    sizes = [setting.sizes(TIME, 32_768) for setting in (static, dynamic)]
    ours_s = min(prefill(TIME, pipeline, each).ttft_s for each in sizes)
    assert ours_s <= 1.01 * exhaustive_s(TIME, pipeline, 32_768, tilts=10)


def test_a_search_begins_with_the_default_and_balances_the_layers():
    layout = ModelLayout.embedded()
    default = Setting(first=512, smoothing=0.0, layers=HALVES)
    tried = search(known(), layout, default, 16384, chunk_max=4096)
    assert tried[0].setting == default
    assert all(each.setting != default for each in tried[1:])
    assert tried[1].setting.layers == ((0, 4), (4, 6))
    assert tried[1].first_token_s < tried[0].first_token_s
    assert tried[1].first_token_s <= 1.01 * min(each.first_token_s for each in tried)
    assert max(each.setting.first for each in tried[1:]) <= 4096
    with pytest.raises(BadInput, match="a prompt of 0 tokens: nothing to tune below 64"):
        search(known(), layout, default, 0, chunk_max=4096)


def test_settings_with_the_same_chunks_are_tried_once():
    """No chunk is below 64, so with a first one of 64 dynamic sizes are static."""
    default = Setting(first=64, smoothing=0.0, layers=HALVES)
    tried = search(known(), ModelLayout.embedded(), default, 2048, chunk_max=64)
    assert [each.setting for each in tried] == [default, replace(default, layers=((0, 4), (4, 6)))]


def test_flags_are_those_of_ess_prefill():
    dynamic = Setting(first=768, smoothing=0.85, layers=((0, 4), (4, 6)))
    assert dynamic.flags() == [
        *("--chunk", "768", "--dynamic-chunking", "--smooth", "0.85"),
        *("--pp-layer-partition", "4,2"),
    ]
    assert Setting(first=512, smoothing=0.0, layers=((0, 6),)).flags() == ["--chunk", "512"]


def test_sizes_are_those_of_the_engine():
    setting = Setting(first=512, smoothing=0.75, layers=HALVES)
    chunking = Chunking(first=512, context=4096, smoothing=0.75)
    assert setting.sizes(TIME, 4095) == chunks(TIME, chunking, prompt=4095)
    assert setting.ends(TIME, 4095)[-1] == 4095
