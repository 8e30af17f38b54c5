"""Steps in two halves and experts in every order: same tokens, and what was hidden behind what."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest

from ess.engine.layers.experts import ExpertStep
from ess.engine.step.runner import layer_runs
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.overlap.policy import Mode
from ess.overlap.timeline import Span
from tests.model.test_engine import expected, prompt, run
from tests.model.test_schedules import engine, finished, timed
from tests.support.few import few
from tests.unit.test_tbo import ORDERS

CASES = [
    # family, mode, sbo, mtp, chunks
    ("v32", "none", "off", 1, 1),
    ("glm", "none", "combine-shared", 3, 2),
    ("glm", "da", "dispatch-shared", 1, 1),
    ("v32", "da", "combine-down", 3, 1),
    ("v32", "dba", "combine-shared", 3, 2),
    ("glm", "dba", "off", 3, 1),
    ("glm", "resident", "combine-down", 3, 1),
    ("v32", "resident", "dispatch-shared", 1, 8),
    ("glm", "layerwise", "off", 1, 8),
    ("v32", "layerwise", "combine-down", 1, 2),
]


@pytest.mark.parametrize(("family", "mode", "sbo", "mtp", "chunks"), few(CASES[::2], all_of=CASES))
def test_two_halves_give_the_plain_model_s_tokens(family, mode, sbo, mtp, chunks):
    """Every layer is compared with the host's rows too, in turn, one a step."""
    eng = engine(
        family,
        modes=mode,
        sbo=sbo,
        mtp=mtp,
        chunks=chunks,
        tbo="on",
        verify_every=1,
        verify_fatal=True,
    )
    finished(eng, family, lengths=(1, 2, 90, 110, 130))
    assert eng.tuning.split_count > 5
    assert eng.verifier.checked_count > 5


GRID = [
    (*case, ("on", "off")[at % 2], (1, 2, 8)[at % 3])
    for at, case in enumerate(
        itertools.product(
            ("v32", "glm"), ("none", "da", "dba", "resident", "layerwise"), ORDERS, (1, 2, 4)
        )
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode", "sbo", "mtp", "tbo", "chunks"),
    few([GRID[11 * at] for at in (0, 1, 2, 3, 5, 9)], all_of=GRID),
)
def test_every_schedule_in_every_order(family, mode, sbo, mtp, tbo, chunks):
    eng = engine(family, modes=mode, sbo=sbo, mtp=mtp, chunks=chunks, tbo=tbo, verify_every=1)
    finished(eng, family, count=12, lengths=(2, 90, 130))
    assert (eng.tuning.split_count > 2) == (tbo == "on")
    assert eng.verifier.mismatch_count == 0


@pytest.mark.parametrize(
    ("family", "sbo"),
    few(
        [("v32", "combine-down"), ("glm", "combine-shared"), ("v32", "dispatch-shared")],
        all_of=itertools.product(
            ("v32", "glm"), ("combine-down", "combine-shared", "dispatch-shared")
        ),
    ),
)
def test_experts_in_every_order_give_the_plain_model_s_tokens(family, sbo):
    eng = engine(family, modes="da", sbo=sbo, mtp=2)
    finished(eng, family)
    assert eng.tuning.split_count == 0


def split_step(eng) -> list[Span]:
    """One step of two requests in halves, as it was run."""
    made = [eng.add(prompt(length), Sampling(tokens_max=9)) for length in (130, 131)]
    while any(len(request.output) < 3 for request in made):
        eng.step()
    eng.offload.drain()
    timeline = eng.tuning.timeline
    timeline.keeps_spans = True
    eng.step()
    return list(timeline.spans)


def at(spans: list[Span], layer: int, first_query: int, stage: str) -> int:
    [place_there] = [
        place
        for place, span in enumerate(spans)
        if (span.layer, span.first_query, span.stage) == (layer, first_query, stage)
    ]
    return place_there


def test_each_half_s_fetch_stands_beside_the_other_s_experts():
    spans = split_step(engine("v32", modes="da", tbo="on"))
    for layer in (1, 2):
        assert at(spans, layer, 0, "plan") < at(spans, layer, 1, "index"), "batch order"
        fetch, wait = at(spans, layer, 1, "plan"), at(spans, layer, 1, "wait")
        assert fetch < at(spans, layer, 0, "up") < wait
    fetch, wait = at(spans, 2, 0, "plan"), at(spans, 2, 0, "wait")
    assert fetch < at(spans, 1, 1, "up") < wait


def experts_take(monkeypatch: pytest.MonkeyPatch, us: int) -> None:
    up = ExpertStep.up

    def slow(self: ExpertStep) -> None:
        self.timeline.clock.advance(us / 1e6)
        up(self)

    monkeypatch.setattr(ExpertStep, "up", slow)


def exposed(setting: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Transfer and exposed microseconds per layer of one step under NONE."""
    experts_take(monkeypatch, us=10_000)
    eng = timed("v32", "none", tbo=setting, row_ns=1000, attend_ns=0)
    split_step(eng)
    before = eng.offload.stats()
    eng.offload.drain()
    eng.step()
    after = eng.offload.stats()
    return (
        ((after.transfer_ns - before.transfer_ns) // 1000).tolist(),
        ((after.exposed_ns - before.exposed_ns) // 1000).tolist(),
    )


def test_halves_hide_fetches_that_nothing_else_hides(monkeypatch):
    moved, shown = exposed("off", monkeypatch)
    assert min(moved) > 0
    assert shown == moved
    moved, shown = exposed("on", monkeypatch)
    assert min(moved) > 0
    assert shown[0] == moved[0], "the dense layer runs whole"
    assert 0 < shown[1] < moved[1], "only the first half's first fetch has nothing beside it"
    assert shown[2] == 0


@pytest.mark.parametrize("sbo", ORDERS)
def test_the_order_of_stages_is_on_the_timeline(sbo):
    spans = split_step(engine("v32", modes="none", sbo=sbo, tbo="on"))
    order = [span.stage for span in spans if (span.layer, span.first_query) == (1, 0)]
    attention = ["index", "select", "plan", "pre_attn", "wait", "attend_all"]
    assert order == attention + re.sub(r"[|\d]", " ", ORDERS[sbo]).split()


def test_a_step_below_the_floor_runs_whole_and_says_why():
    eng = engine("v32", modes="da", tbo=4)
    one = eng.add(prompt(90), Sampling(tokens_max=20))
    for _ in range(5):
        eng.step()
    assert eng.tuning.reasons == ("one sequence has no second half", "1 tokens, the floor is 4")
    crowd = [eng.add(prompt(length), Sampling(tokens_max=9)) for length in (1, 2, 3)]
    while eng.tuning.split_count == 0:
        eng.step()
    assert eng.tuning.reasons == ()
    run(eng)
    for request in (one, *crowd):
        assert request.output == expected("v32", len(request.prompt), len(request.output))


def test_rows_that_were_only_located_do_not_outlive_the_other_half_s_plan():
    """In a tight arena half b evicts; half a must have planned, not only located."""
    eng = engine("glm", modes="resident", tbo="on", verify_every=1, verify_fatal=True)
    finished(eng, "glm")
    split, whole = eng.tuning.mode_counts[1:3], eng.tuning.mode_counts[0]
    assert eng.tuning.split_count > 5
    assert whole.sum() > 0
    assert split[:, Mode.NONE].sum() >= 2 * 2 * eng.tuning.split_count


def test_followers_go_the_way_of_their_leader():
    groups = ((0, 1), (2, 3), (4,), (5, 6))
    layout = ModelLayout(name="t", layer_count=7, groups=groups)
    with_experts = (1, 2, 4, 5, 6)
    layers = [
        SimpleNamespace(number=at, has_rows=True, experts=at in with_experts or None)
        for at in range(7)
    ]
    runs = [
        (split, [each.number for each in layers_in])
        for split, layers_in in layer_runs(layers, layout)
    ]
    assert runs == [(False, [0, 1]), (True, [2, 3, 4, 5, 6])]


def test_settings_are_checked_when_the_engine_is_made():
    with pytest.raises(BadInput, match="tbo is 'half'"):
        engine("v32", modes="none", tbo="half")
    with pytest.raises(BadInput, match="sbo is 'all'"):
        engine("v32", modes="none", sbo="all")
