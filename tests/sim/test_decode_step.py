from __future__ import annotations

import itertools

import pytest

from ess.cost import exposed, transfer_us
from ess.errors import BadInput
from ess.overlap.policy import Mode
from ess.sim.decode_step import Scenario, simulate
from ess.sim.operators.paper import LAYERS, PaperOperators
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import MicroBatch, hiding_of
from ess.sim.timeline import COMPUTE, EXCHANGE, FETCH, STORE, Timeline

WIDE = Parallel.wide(32)


@pytest.fixture(scope="module")
def operators() -> PaperOperators:
    return PaperOperators()


def scenario(
    miss_count: float | None,
    mode: Mode | None = None,
    parallel: Parallel = WIDE,
    **changes: int,
) -> Scenario:
    misses = None if miss_count is None else (miss_count,) * LAYERS
    sizes = {"batch": 160, "queries_each": 2, "context": 131_072} | changes
    return Scenario(**sizes, parallel=parallel, misses=misses, mode=mode)


def test_a_task_waits_for_its_lane_and_for_what_it_needs():
    timeline = Timeline()
    first = timeline.add(COMPUTE, "index", 10)
    copy = timeline.add(FETCH, "fetch", 30, (first,))
    timeline.add(COMPUTE, "pre_attn", 5)
    last = timeline.add(COMPUTE, "attend", 1, (copy,))
    assert timeline.spans[last].start_us == 40
    assert (timeline.end_us, timeline.busy_us(COMPUTE)) == (41, 16)
    with pytest.raises(BadInput, match="would take nan"):
        timeline.add(COMPUTE, "index", float("nan"))


def test_a_lane_does_one_thing_at_a_time_and_time_is_conserved(operators: PaperOperators):
    step = simulate(operators, scenario(200.0))
    for lane in (COMPUTE, EXCHANGE, FETCH, STORE):
        spans = [span for span in step.timeline.spans if span.lane == lane]
        assert spans, lane
        assert all(a.end_us <= b.start_us for a, b in itertools.pairwise(spans))
    whole = simulate(operators, scenario(None))
    assert step.step_us - whole.step_us == pytest.approx(step.exposed_us)
    moved = transfer_us(
        miss_count=200, request_count=80, row_bytes=656, bytes_per_us=operators.machine.link_rate
    )
    assert step.timeline.busy_us(FETCH) == pytest.approx(2 * LAYERS * moved)


@pytest.mark.parametrize("miss_count", [32.0, 128.0, 256.0, 512.0])
@pytest.mark.parametrize("mode", [Mode.NONE, Mode.DA, Mode.DBA])
def test_lanes_and_formula_agree(operators: PaperOperators, miss_count: float, mode: Mode):
    """The timeline and the cost model were written apart: what they expose is the same."""
    asked = scenario(miss_count, mode)
    moved = transfer_us(
        miss_count=miss_count,
        request_count=80,
        row_bytes=656,
        bytes_per_us=operators.machine.link_rate,
    )
    stages = operators.stages(asked.shape)
    behind = hiding_of(operators, stages, query_count=160, missing_share=miss_count / 4096)
    said = exposed(moved, behind)
    formula = {Mode.NONE: said.none, Mode.DA: said.da, Mode.DBA: said.dba}[mode]
    timeline = simulate(operators, asked).exposed_us / (2 * LAYERS)
    assert timeline == pytest.approx(formula, abs=0.03 * formula + operators.index_split_us)


def test_the_policy_is_never_worse_than_a_forced_mode(operators: PaperOperators):
    chosen = simulate(operators, scenario(180.0)).exposed_us
    forced = [
        simulate(operators, scenario(180.0, mode)).exposed_us
        for mode in (Mode.NONE, Mode.DA, Mode.DBA)
    ]
    assert chosen <= min(forced) + 1e-6


def test_stages_add_up_to_the_module(operators: PaperOperators):
    """At a measured point: base x scale, plus what the context adds."""
    stages = operators.stages(MicroBatch(request_count=128, queries_each=1, context=131_072))
    parts = stages.project + stages.pre_attn + stages.attend + stages.output
    measured = operators.tables.attention
    assert parts == pytest.approx(operators.fitted.compute_scale * measured.at(128, 2048))
    assert stages.index == pytest.approx(measured.at(128, 131_072) - measured.at(128, 2048))


def test_two_halves_pay_at_large_batches_only(operators: PaperOperators):
    def step(batch: int, *, tbo: bool) -> float:
        asked = Scenario(batch=batch, queries_each=2, context=32_768, tbo=tbo)
        return simulate(operators, asked).step_us

    assert step(8, tbo=True) > step(8, tbo=False)
    assert step(256, tbo=True) < step(256, tbo=False)


@pytest.mark.parametrize("ranks", [8, 16, 64, 256])
def test_other_expert_parallel_sizes(operators: PaperOperators, ranks: int):
    assert simulate(operators, scenario(50.0, parallel=Parallel.wide(ranks))).step_us > 0


def test_bad_scenarios_are_refused(operators: PaperOperators):
    with pytest.raises(BadInput, match="batch, queries and context"):
        scenario(None, batch=0)
    with pytest.raises(BadInput, match="misses of 2 layers"):
        simulate(operators, Scenario(batch=1, queries_each=1, context=1, misses=(1.0, 2.0)))
    with pytest.raises(BadInput, match="no expert table for 24 ranks"):
        simulate(operators, scenario(None, parallel=Parallel.wide(24)))


def test_a_batch_may_be_less_than_a_request_for_every_gpu(operators: PaperOperators):
    """Half of the attention groups are empty: their experts see half the tokens."""
    steps = [
        simulate(operators, Scenario(batch=batch, queries_each=1, context=8192, tbo=False)).step_us
        for batch in (0.25, 0.5, 1)
    ]
    assert steps == sorted(steps, key=lambda us: round(us, 6))
    assert steps[2] < 1.2 * steps[0]


def test_a_prediction_says_how_far_it_may_be_off(operators: PaperOperators):
    told = simulate(operators, scenario(None))
    assert told.band[0] < 0 < told.band[1]
    assert "publication" in told.marks[0]


def test_the_constants_of_the_paper_refuse_what_the_paper_does_not_say(operators: PaperOperators):
    heads = Parallel(attention_tp=8, expert_ep=8)
    with pytest.raises(BadInput, match="TP8 DP1, experts EP8 TP1, PP1, 0 prompt tokens"):
        simulate(operators, scenario(None, parallel=heads))
    with pytest.raises(BadInput, match="512 prompt tokens"):
        simulate(operators, scenario(None, prompt_chunk=512, tbo=0))
    with pytest.raises(BadInput, match="TP 8 x DP 1 are 8 GPUs, experts EP 4 x TP 1 are 4"):
        Parallel(attention_tp=8, expert_ep=4)
