"""Layers over stages: against every other cut, as SGLang cuts, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.engine.chunking.partition import (
    GRAIN,
    Costs,
    counted_costs,
    even_costs,
    explained,
    partition,
    read_partition,
)
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.registry import read_config
from ess.models.weights.expected.dry_run import read_config as published
from ess.server.commands.cli import main

V32 = ModelLayout.deepseek_v32(mtp=False)


def counts(layout: ModelLayout, stages: int, **wishes) -> list[int]:
    parts = partition(layout, stages, **wishes)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, layout.layer_count)
    for part in parts:
        layout.part(part.start, part.stop)
    return [len(part) for part in parts]


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        (1, [61]),
        (2, [30, 31]),
        (4, [15, 15, 15, 16]),
        (8, [7, 7, 7, 8, 8, 8, 8, 8]),
        (61, [1] * 61),
    ],
)
def test_what_does_not_divide_goes_to_later_stages(stages, wanted):
    assert counts(V32, stages) == wanted


def test_an_mtp_layer_is_work_of_the_last_stage():
    assert counts(ModelLayout.deepseek_v32(), 4) == [15, 15, 16, 15]


def test_the_published_models_by_their_operations():
    """DeepSeek's dense layers cost what its expert layers do; the joint of MTP costs a fifth of a
    layer beside its layer. GLM-5.2's layers without an indexer are cheaper."""
    deepseek = read_config(published("deepseek-v3.2"))
    costs = counted_costs(deepseek)
    assert costs.layers[0] == pytest.approx(costs.layers[10], rel=0.02)
    assert 1.0 < costs.mtp / costs.layers[10] < 1.5
    assert counts(V32, 4, costs=Costs(layers=costs.layers)) == [15, 15, 15, 16]
    assert counts(deepseek.layout(), 4, costs=costs) == [15, 16, 16, 14]
    glm = read_config(published("glm-5.2"))
    layers = counted_costs(glm).layers
    assert layers[7] < layers[6]
    starts = {group[0] for group in glm.layout().groups}
    parts = partition(glm.layout(), 4, costs=counted_costs(glm))
    assert {part.start for part in parts} <= starts


def test_dear_first_layers_leave_the_first_stage_with_fewer():
    layers = (3.0, 3.0, 3.0, *[1.0] * 21)
    assert counts(_plain([1] * 24), 3, costs=Costs(layers=layers)) == [4, 10, 10]
    heavy_head = Costs(layers=(1.0,) * 24, head=3.0)
    assert counts(_plain([1] * 24), 3, costs=heavy_head) == [9, 9, 6]
    assert counts(_plain([1] * 24), 3, costs=Costs(layers=(1.0,) * 24, embedding=3.0)) == [6, 9, 9]


def _plain(lengths: list[int]) -> ModelLayout:
    ends = list(itertools.accumulate(lengths))
    groups = tuple(
        tuple(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)
    )
    return ModelLayout(name="plain", layer_count=sum(lengths), groups=groups)


def every_cut(group_count: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, group_count), stages - 1):
        yield (0, *inner, group_count)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_other_cut_is_better(drawn):
    """Cheaper at its dearest stage, then evener, then with more in later stages."""
    lengths = drawn.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    stages = drawn.draw(st.integers(1, len(lengths)))
    count = sum(lengths)
    layers = drawn.draw(st.lists(st.integers(1, GRAIN), min_size=count, max_size=count))
    layers[drawn.draw(st.integers(0, count - 1))] = GRAIN
    ends = drawn.draw(st.tuples(st.integers(0, 80), st.integers(0, 80)))
    costs = Costs(layers=tuple(map(float, layers)), embedding=ends[0], mtp=ends[1])
    layout = _plain(lengths)
    starts = [0, *itertools.accumulate(lengths)]

    def judged(cut: tuple[int, ...]) -> tuple[int, int, list[int]]:
        works = [sum(layers[starts[a] : starts[b]]) for a, b in itertools.pairwise(cut)]
        works[0] += ends[0]
        works[-1] += ends[1]
        sizes = [starts[b] - starts[a] for a, b in itertools.pairwise(cut)]
        return max(works), sum(work**2 for work in works), sizes

    best = min(map(judged, every_cut(len(lengths), stages)))
    assert counts(layout, stages, costs=costs) == best[2]


def test_a_given_partition_is_taken():
    assert partition(V32, 4, given=(16, 15, 15, 15))[1] == range(16, 31)
    assert counts(V32, 4, given=read_partition("15, 15,15,16")) == [15, 15, 15, 16]


@pytest.mark.parametrize(
    ("layout", "stages", "given_counts", "says"),
    [
        (V32, 4, (15, 15, 31), "layer partition 15,15,31 has 3 stages, pp_size is 4"),
        (V32, 4, (15, 15, 15, 15), "adds up to 60 layers, 'deepseek-v3.2' has 61"),
        (V32, 3, (61, 0, 0), "61,0,0 gives 0 layers to a stage"),
        (V32, 3, (63, -1, -1), "gives -1 layers"),
        (
            ModelLayout.glm_52(),
            2,
            (40, 38),
            "layer partition 40,38: a part cannot begin at layer 40: layers 38..41 share one"
            " selection, so a part begins at 38 or 42",
        ),
        (V32, 62, None, "pp_size is 62: 'deepseek-v3.2' has 61 groups .* 1 to 61 stages"),
        (V32, 0, None, "pp_size is 0"),
        (ModelLayout.glm_52(), 22, None, "has 21 groups"),
    ],
)
def test_a_partition_that_cannot_be_is_refused_with_its_numbers(layout, stages, given_counts, says):
    with pytest.raises(BadInput, match=says):
        partition(layout, stages, given=given_counts)


@pytest.mark.parametrize("layers", [(), (1.0,) * 60, (0.0,) * 61, (1.0,) * 60 + (-1.0,)])
def test_costs_that_are_not_the_model_s_are_refused(layers):
    with pytest.raises(BadInput, match="cost"):
        partition(V32, 4, costs=Costs(layers=layers))


@pytest.mark.parametrize("text", ["", "15,", "15;15", "15,-1", "a,b", "1.5,2", "²,1", "1," * 500])
def test_text_that_is_no_partition_is_refused(text):
    with pytest.raises(BadInput, match="write layers as 15,15,15,16"):
        read_partition(text)


def test_the_choice_is_explained():
    layout = ModelLayout.deepseek_v32()
    lines = explained(layout, partition(layout, 4))
    assert lines == [
        "stage 0: layers 0..14 (15) and the embedding, 24.2% of the work",
        "stage 1: layers 15..29 (15), 24.2% of the work",
        "stage 2: layers 30..45 (16), 25.8% of the work",
        "stage 3: layers 46..60 (15) and the MTP layer, 25.8% of the work",
        "stages wait 3.1% of the time for the slowest",
    ]
    alone = explained(V32, partition(V32, 1), even_costs(V32))
    assert alone[0] == "stage 0: layers 0..60 (61) and the embedding, 100.0% of the work"


def test_ess_plan_says_who_has_which_layers(capsys):
    assert main(["plan", "--pp-size", "4", "--mtp", "1"]) == 0
    shown = capsys.readouterr().out
    assert "prefill in a pipeline of 4" in shown
    assert "stage 3: layers 45..60 (16), 26.2% of the work" in shown
    assert main(["plan", "--pp-layer-partition", "20,41", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pipeline"]["layers"] == [20, 41]
    assert document["pipeline"]["explained"][1].startswith(
        "stage 1: layers 20..60 (41) and the MTP"
    )
    assert main(["plan", "--json"]) == 0
    assert "pipeline" not in json.loads(capsys.readouterr().out)
    assert main(["plan", "--pp-size", "4", "--pp-layer-partition", "30,31"]) == 2
    assert "layer partition 30,31 has 2 stages, pp_size is 4" in capsys.readouterr().err
