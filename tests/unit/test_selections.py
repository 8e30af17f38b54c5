"""The generator: form, determinism, limits, and the statistics it is there for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ess.errors import BadInput
from ess.sim.locality import laboratory, profiles
from ess.sim.locality.policies import PlannerArena
from ess.sim.locality.selections import COLD_SCORE, LayerProfile, LayerStream, RequestLoad
from ess.sim.locality.similarity import containment, neighbour_fetch, step_similarity
from ess.sim.locality.stack_distances import miss_curve
from ess.sim.locality.workloads import generated, recorded, write_trace
from ess.sim.published import layer_misses, mean_misses
from ess.trace import RequestStep, TraceHeader, TraceReader, TraceWriter

LOAD = RequestLoad(context=3000, step_count=12, query_count=2, top_k=128, recent=8, seed=4)
PROFILE = LayerProfile(hot=400, cold=6, drift=2.0)


def selections(load: RequestLoad, profile: LayerProfile, *, layer: int = 0) -> np.ndarray:
    return np.stack([drawn.selection for drawn in LayerStream(load, profile, layer=layer)])


@pytest.mark.parametrize("kinship", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("recent", [0, 8])
def test_a_selection_is_exact_ascending_distinct_and_inside(recent: int, kinship: float) -> None:
    load = replace(LOAD, recent=recent, kinship=kinship)
    for number, drawn in enumerate(LayerStream(load, PROFILE, layer=3)):
        assert drawn.length == load.context + 2 * number
        assert drawn.selection.shape == (2, 128)
        assert drawn.selection.dtype == np.int32
        for query, picked in enumerate(drawn.selection):
            length = drawn.length + query + 1
            assert (np.diff(picked) > 0).all()
            assert picked[0] >= 0
            assert picked[-1] < length
            assert np.isin(np.arange(length - recent, length), picked).all()
        assert (drawn.scores[drawn.selection] > COLD_SCORE).all()


def test_a_short_context_selects_everything_and_pads() -> None:
    load = RequestLoad(context=20, step_count=3, top_k=32)
    for number, picked in enumerate(selections(load, PROFILE)[:, 0]):
        assert picked.tolist() == [*range(21 + number), *[-1] * (11 - number)]


def test_streams_repeat_and_layers_and_seeds_differ() -> None:
    assert np.array_equal(selections(LOAD, PROFILE), selections(LOAD, PROFILE))
    assert not np.array_equal(selections(LOAD, PROFILE), selections(LOAD, PROFILE, layer=1))
    assert not np.array_equal(selections(LOAD, PROFILE), selections(replace(LOAD, seed=5), PROFILE))
    workload = generated(LOAD, PROFILE)
    first, second = ([step.rows for step in workload.steps()] for _ in range(2))
    assert np.array_equal(first, second)
    assert step_similarity([workload.windows[-1:], first[0][:1]]) > 0.4, "windows run on into steps"


def test_kin_layers_are_alike_and_others_are_not() -> None:
    def alike(kinship: float) -> float:
        load = replace(LOAD, context=16_384, top_k=1024, kinship=kinship, recent=0)
        two = [selections(load, LayerProfile(hot=4000, cold=20), layer=i) for i in (1, 2)]
        return float(np.mean([containment(a, b) for a, b in zip(*two, strict=True)]))

    none, some, full = map(alike, (0.0, 0.6, 1.0))
    assert none < 0.15
    assert none + 0.05 < some < full - 0.05
    assert full > 0.4


def test_similarity_is_containment_not_jaccard() -> None:
    assert containment(np.array([1, 2, 3, -1]), np.array([2, 3, 4, 5, -1])) == 0.5
    assert containment(np.array([2, 3, 4, 5]), np.array([1, 2, 3])) == pytest.approx(2 / 3)


def test_the_default_layer_reproduces_the_published_misses_at_32k() -> None:
    """A short run of the average layer; the benchmark holds all layers and contexts to 20 %."""
    load = RequestLoad(context=32_768, step_count=60, query_count=2, seed=1)
    workload = generated(load, LayerProfile(), window_count=0)
    filled = np.random.default_rng(1).permutation(workload.row_count).astype(np.int32)
    curve = miss_curve(workload, skip=30, filled=filled)
    for ratio in (0.2, 0.3, 0.5, 0.9):
        wanted = mean_misses()[32_768][ratio]
        assert curve.at(int(ratio * 32_768)) == pytest.approx(wanted, rel=0.2)


def test_published_tables_are_whole() -> None:
    by_layer = layer_misses()
    assert {context for context, ratio in by_layer if ratio == 0.2} == {1 << 15, 1 << 16, 1 << 17}
    assert {len(misses) for misses in by_layer.values()} == {61}
    fewer, more = (np.array(by_layer[32_768, ratio]) for ratio in (0.2, 0.3))
    assert fewer.mean() == pytest.approx(182.5, abs=1)
    assert more.mean() == pytest.approx(102.5, abs=1)
    assert (fewer > more).all(), "fewer slots miss more, in every layer"
    assert {len(ratios) for ratios in mean_misses().values()} == {9}
    assert len(profiles.HOT) == len(profiles.COLD) == 61
    assert profiles.profile(17).hot_count(65_536) == round(0.42 * 65_536)
    assert all(profiles.profile(layer).hot_count(32_768) >= 2048 for layer in range(61))


def test_the_neighbours_selection_is_a_poor_hint() -> None:
    load = replace(LOAD, context=8192, top_k=512, kinship=0.9, step_count=20, recent=0)
    profile = LayerProfile(hot=1700, cold=15)
    judged = neighbour_fetch(load, (profile, profile), layer=5, slots=1664, skip=4)
    assert judged.useful <= min(judged.missed, judged.fetched)
    assert judged.fetched_max >= judged.fetched > 3 * judged.useful > 0


def test_a_trace_that_is_written_replays_as_what_was_generated(tmp_path: Path) -> None:
    profiles = [PROFILE, replace(PROFILE, hot=700)]
    header = write_trace(tmp_path / "t", LOAD, profiles, layout="deepseek-v3.2")
    assert (header.mtp, header.group_count, header.context) == (2, 2, 3024)
    with TraceReader(tmp_path / "t") as reader:
        for group, profile in enumerate(profiles):
            drawn = generated(LOAD, profile, layer=group, window_count=0)
            read = recorded(reader, group=group)
            assert (read.row_count, read.step_count) == (drawn.row_count, drawn.step_count)
            for ours, theirs in zip(drawn.steps(), read.steps(), strict=True):
                assert np.array_equal(ours.rows, theirs.rows)
                assert np.array_equal(ours.fresh, theirs.fresh)


def test_lead_steps_become_windows(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", LOAD, [PROFILE], layout="x")
    with TraceReader(tmp_path / "t") as reader:
        whole, led = recorded(reader), recorded(reader, lead_steps=5)
        assert led.step_count == 7
        steps = list(whole.steps())
        assert np.array_equal(led.windows, np.concatenate([step.rows for step in steps[:5]]))
        assert np.array_equal(next(led.steps()).rows, steps[5].rows)
        with pytest.raises(BadInput, match="lead_steps 12"):
            recorded(reader, lead_steps=12)


def test_requests_have_rows_of_their_own_and_leave_when_they_end(tmp_path: Path) -> None:
    header = TraceHeader(layout="x", group_count=1, top_k=2, mtp=2, context=100)
    with TraceWriter(tmp_path / "t", header=header) as writer:
        for number, names in enumerate(([7, 9], [9], [9, 5])):
            requests = [
                RequestStep(request=name, length=10, query_count=1 + (name == 9), accepted=1)
                for name in names
            ]
            count = sum(entry.query_count for entry in requests)
            writer.write_group(0, np.array([[3, 5]] * (count - 1) + [[4, -1]], np.int32))
            writer.commit_step(number, requests)
    with TraceReader(tmp_path / "t") as reader:
        workload = recorded(reader)
        first, second, last = workload.steps()
        arena = PlannerArena(workload, slots=64, top_k=2)
        assert laboratory.run(workload, {"lru": arena})["lru"].misses == [5, 0, 1]
    assert first.rows.tolist() == [[3, 5], [103, 105], [104, -1]]
    assert first.fresh.tolist() == [10, 110, 111]
    assert last.rows.tolist() == [[103, 105], [103, 105], [4, -1]], "5 has the place of 7"
    assert (first.ended, second.ended) == (((0, 100),), ())
    assert last.ended == ((100, 200), (0, 100))
    assert not arena.resident().any(), "everybody has left"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LayerProfile(hot=0), "hot must be positive"),
        (lambda: LayerProfile(cold=-1), "not negative"),
        (lambda: LayerProfile(hot_share=1.5), "hot_share 1.5"),
        (lambda: LayerProfile(fast_memory=1.0), "fast_memory 1.0"),
        (lambda: replace(LOAD, context=0), "must all be positive"),
        (lambda: replace(LOAD, recent=129), "recent 129"),
        (lambda: replace(LOAD, kinship=1.1), "kinship 1.1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        make()
