"""Measured operators put together: where they were measured, beyond it, and what they refuse."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ess.errors import BadInput
from ess.overlap.policy import Mode
from ess.sim.decode_step import Scenario, simulate
from ess.sim.operators.families import FAMILIES, Kind
from ess.sim.operators.gpus import silicon_of
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.silicon import host
from ess.sim.operators.silicon.assembled import SiliconOperators
from ess.sim.operators.silicon.attention import Dense, Sparse
from ess.sim.operators.silicon.bank import shipped_bank
from ess.sim.operators.silicon.chip import CHIPS, tiled
from ess.sim.operators.silicon.stacks import SGLANG, Stack
from ess.sim.operators.stages import MicroBatch
from ess.sim.prefill import prefill_time
from ess.sim.prefill.colocated import mixed_us, prompt_us, stall_us
from ess.sim.prefill.prompt_pass import PromptPass, pass_trust, pass_us

NODE = Parallel.wide(8)
HEADS = Parallel(attention_tp=8, expert_tp=8)
EXPERT = Kind(is_dense=False, has_indexer=True)


def step_us(gpu: str = "h200", family: str = "deepseek-v3.2", **asked: object) -> float:
    sizes = {"batch": 16, "queries_each": 1, "context": 8192, "parallel": NODE, "tbo": False}
    return simulate(silicon_of(gpu, family=family), Scenario(**{**sizes, **asked})).step_us


def test_a_measured_module_is_the_sum_of_its_parts():
    stages = silicon_of("h200", family="deepseek-v3.2").stages(
        MicroBatch(request_count=16, queries_each=1, context=2048, parallel=NODE), EXPERT
    )
    parts = stages.project + stages.pre_attn + stages.attend + stages.output
    assert stages.index == 0
    assert parts == pytest.approx(170.0)


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_the_first_draft_pass_fetches_what_a_layer_misses_on_average(queries: int):
    """Without overlap every fetch is waited for: the layers', and once the drafts'."""
    h200 = silicon_of("h200", family="deepseek-v3.2")
    misses = tuple(float(20 + layer) for layer in range(h200.family.layout.layer_count))
    step = simulate(
        h200,
        Scenario(
            batch=16,
            queries_each=queries,
            context=32_768,
            parallel=NODE,
            tbo=False,
            misses=misses,
            mode=Mode.NONE,
        ),
    )
    waited = [*misses, sum(misses) / len(misses)] if queries > 1 else misses
    moved_us = 16 * sum(waited) * h200.family.layout.row_bytes / h200.machine.link_rate
    assert step.exposed_us == pytest.approx(moved_us)


def test_modules_go_on_where_they_were_measured_and_beyond():
    bank = shipped_bank("h200", stack=SGLANG)
    dense = Dense(bank=bank, heads=128)
    assert dense.us(requests=8, queries_each=1, context=16_384) == pytest.approx(161.5)
    sparse = Sparse(bank=bank, model="deepseek-v3.2", heads=128, kv="fp8")
    assert sparse.us(tokens=128, context=2048) == pytest.approx(357.7)
    for module in (
        lambda count, context: dense.us(requests=count, queries_each=1, context=context),
        lambda count, context: sparse.us(tokens=count, context=context),
    ):
        for count in (1, 3, 16, 100, 256):
            times = [module(count, context) for context in (1024, 8192, 30_000, 131_072)]
            assert times == sorted(times)
        for context in (4096, 65_536):
            times = [module(count, context) for count in (1, 4, 16, 64, 256)]
            assert times == sorted(times)


def test_few_tokens_read_the_experts_that_they_touch():
    """No jump of four fifths from 8 to 16 tokens and of a seventh from 16 to 32."""
    curve = shipped_bank("h200", stack=SGLANG).fused_experts["deepseek", 1, 8]
    grown = [curve.at(2 * count) / curve.at(count) for count in (8, 16, 32)]
    assert grown == sorted(grown, reverse=True)
    assert curve.at(1) == pytest.approx(36.6, abs=1)
    assert curve.at(128) == pytest.approx(351, abs=1)


def test_layers_that_share_a_selection_scan_no_keys():
    operators = silicon_of("h200", family="glm-5.2")
    kinds = operators.family.kinds
    assert sum(kind.has_indexer for kind in kinds) == 21
    shape = MicroBatch(request_count=8, queries_each=1, context=131_072, parallel=NODE)
    scans = [operators.stages(shape, kind).index for kind in kinds]
    assert [scan > 0 for scan in scans] == [kind.has_indexer for kind in kinds]


@pytest.mark.parametrize("gpu", CHIPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_on_every_gpu_and_more_work_takes_longer(gpu: str, family: str):
    for parallel in (NODE, HEADS, Parallel(attention_dp=8, expert_tp=8), Parallel.wide(32)):
        times = [step_us(gpu, family, parallel=parallel, batch=n) for n in (0.25, 4, 32, 128)]
        assert all(later > 0.9 * earlier for earlier, later in itertools.pairwise(times))
        assert times[-1] > times[0]


def test_what_is_no_table_is_marked_and_widens_the_band():
    told = simulate(
        silicon_of("h200", family="deepseek-v3.2"),
        Scenario(batch=4, queries_each=1, context=8192, tbo=False),
    )
    assert told.marks == ()
    assert told.band == (-0.15, 0.15)
    far = Scenario(batch=64, queries_each=1, context=1_000_000, parallel=Parallel.wide(144))
    marked = simulate(silicon_of("h800", family="deepseek-v3.2"), far)
    text = " ".join(marked.marks)
    assert [word for word in ("H100", "vLLM", "18 nodes", "131,072") if word not in text] == []
    assert marked.band[1] > told.band[1]
    fewer = simulate(silicon_of("h800", family="deepseek-v3.2"), replace(far, batch=32))
    assert fewer.marks == marked.marks, "one sentence, however many queries"


def test_more_gathered_tokens_than_were_measured_are_marked():
    """All eight groups of a node with 8,192 tokens each; one group alone is within the table."""
    said = {
        groups: pass_trust(
            silicon_of("h200", family="deepseek-v3.2"),
            PromptPass(parallel=NODE, tokens=8192, groups=groups),
        ).marks
        for groups in (8, 1)
    }
    assert said == {
        8: ("experts of more than 16,384 gathered tokens: carried on from there",),
        1: (),
    }


@pytest.mark.parametrize("stack", ["vllm", "trtllm"])
@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
def test_another_stack_has_its_own_kernels_and_says_what_it_lacks(gpu: str, stack: Stack):
    for family in FAMILIES:
        asked = Scenario(batch=64, queries_each=1, context=8192, parallel=NODE, tbo=False)
        ours, theirs = (
            simulate(silicon_of(gpu, family=family, stack=name), asked) for name in (SGLANG, stack)
        )
        assert theirs.step_us != ours.step_us
        assert theirs.step_us == pytest.approx(ours.step_us, rel=0.6)
        wide = simulate(
            silicon_of(gpu, family=family, stack=stack),
            replace(asked, parallel=Parallel.wide(32)),
        )
        lent = f"exchanges and experts behind them in {stack}: SGLang's times stand in"
        assert lent not in theirs.marks
        assert lent in wide.marks


def test_more_requests_never_take_a_shorter_step_with_vllm_on_b200():
    """Its measured products are the host's time of a launch, and fall with their tokens."""
    operators = silicon_of("b200", family="deepseek-v3.2", stack="vllm")
    way = Parallel(attention_tp=8, attention_dp=2, expert_ep=16, pp=2)
    steps = [
        simulate(operators, Scenario(batch=count / 8, queries_each=1, context=32_768, parallel=way))
        for count in (12, 24, 36)
    ]
    assert steps[0].step_us < steps[1].step_us < steps[2].step_us
    assert "matrix products in vllm: SGLang's times stand in" in steps[0].marks
    shape = MicroBatch(request_count=12, queries_each=1, context=32_768, parallel=way)
    stages = operators.stages(shape, Kind(is_dense=False, has_indexer=True))
    assert stages.shared < 30 < stages.experts


def test_sparse_attention_of_vllm_was_measured_at_any_batch():
    far = Scenario(batch=64, queries_each=1, context=131_072, parallel=NODE, tbo=False)
    marks = {
        stack: simulate(silicon_of("h200", family="deepseek-v3.2", stack=stack), far).marks
        for stack in ("sglang", "vllm", "trtllm")
    }
    assert "vLLM" in marks["sglang"][0]
    assert marks["vllm"] == ()
    assert "sparse attention in trtllm: SGLang's times stand in" in marks["trtllm"]
    with pytest.raises(BadInput, match=r"no operator tables of 'other'; there are sglang, vllm"):
        silicon_of("h200", family="deepseek-v3.2", stack="other")


def test_two_queries_cost_less_than_two_requests():
    """A dense kernel and an indexer read a row once for both."""
    dense = [
        step_us(family="deepseek-v3", context=32_768, parallel=HEADS, **asked)
        for asked in ({"batch": 4, "queries_each": 2}, {"batch": 8, "queries_each": 1})
    ]
    drafts_us = silicon_of("h200", family="deepseek-v3").around_us(
        Scenario(batch=4, queries_each=2, context=32_768, parallel=HEADS).whole
    )
    assert dense[0] - drafts_us < dense[1]


@pytest.mark.parametrize("family", ["deepseek-v3.2", "glm-5.2", "deepseek-v3"])
def test_the_first_draft_pass_has_all_tokens_and_selects_for_the_others(family: str):
    operators = silicon_of("h200", family=family)
    shape = MicroBatch(request_count=8, queries_each=4, context=65_536, parallel=HEADS)
    one = replace(shape, queries_each=1)
    shares = family == "glm-5.2"

    def pass_us(of: MicroBatch, *, has_indexer: bool) -> float:
        stages = operators.stages(of, Kind(is_dense=False, has_indexer=has_indexer))
        wire_us = stages.dispatch + stages.combine - min(stages.dispatch, stages.shared)
        return stages.compute_us + wire_us + operators.head_us(of, 8)

    first_us = pass_us(shape, has_indexer=operators.family.is_sparse)
    later_us = pass_us(one, has_indexer=operators.family.is_sparse and not shares)
    around_us = operators.head_us(shape, 32) + host.STEP_GAP_US + 2 * host.STEP_GAP_US / 3
    assert operators.around_us(shape) == pytest.approx(around_us + first_us + 2 * later_us)
    serial = replace(operators, step_gap_us=host.SERIAL_US)
    waited_us = host.SERIAL_US - host.STEP_GAP_US + (3 - 2 / 3) * host.STEP_GAP_US
    assert serial.around_us(shape) - operators.around_us(shape) == pytest.approx(waited_us)
    assert first_us > later_us
    assert operators.around_us(one) == operators.head_us(one, 8) + host.STEP_GAP_US


def test_two_gpus_on_a_nic_wait_twice_as_long_for_its_bytes():
    """An H20's exchange between nodes is an H200's with half the rate; within a node it is its."""
    h20, h200 = (silicon_of(gpu, family="deepseek-v3") for gpu in ("h20", "h200"))
    sparse = Kind(is_dense=False, has_indexer=False)

    def wire_us(operators: SiliconOperators, tokens: int, gpus: int) -> float:
        parallel = replace(Parallel.wide(gpus), is_sending=True)
        shape = MicroBatch(request_count=tokens, queries_each=1, context=4096, parallel=parallel)
        stages = operators.stages(shape, sparse)
        return stages.dispatch + stages.send + stages.combine + stages.join

    assert wire_us(h20, 64, 8) == wire_us(h200, 64, 8)
    least_us, whole_us = (wire_us(h200, tokens, 32) for tokens in (1, 64))
    assert wire_us(h20, 64, 32) == pytest.approx(least_us + 2 * (whole_us - least_us), rel=0.02)
    heads = Parallel(attention_tp=16, expert_tp=16)
    shape = MicroBatch(request_count=512, queries_each=1, context=4096, parallel=heads)
    slow_us, fast_us = (each.stages(shape, sparse).join for each in (h20, h200))
    assert slow_us - fast_us == pytest.approx(512 * 7168 * 2 / 8 / host.NIC_RATE)


def test_gpus_of_a_rack_exchange_over_its_nvlink():
    """As TensorRT-LLM's exchange grows on GB200, in the package: dispatch in fp8 and combine of 768
    tokens, microseconds by GPUs. Two racks wait for the network, as two nodes do."""
    measured_us = {8: 246.2, 16: 261.8, 32: 278.8, 64: 286.9}
    operators = silicon_of("gb200", family="deepseek-v3")

    def way(gpus: int) -> tuple[float, float]:
        parallel = replace(Parallel.wide(gpus), is_sending=True)
        shape = MicroBatch(request_count=768, queries_each=1, context=4096, parallel=parallel)
        stages = operators.stages(shape, Kind(is_dense=False, has_indexer=False))
        return stages.send + stages.join, stages.dispatch + stages.combine

    least_us, _ = way(8)
    for gpus, us in measured_us.items():
        busy_us, waits_us = way(gpus)
        assert busy_us / least_us == pytest.approx(us / measured_us[8], rel=0.04)
        assert waits_us == 0
    assert way(72)[1] == 0 < way(128)[1]
    marks = [
        simulate(operators, Scenario(batch=8, queries_each=1, context=4096, parallel=way)).marks
        for way in (NODE, Parallel.wide(48), Parallel.wide(128))
    ]
    said = ["more than 8 GPUs on one NVLink", "between racks of GB200"]
    assert [[text in " ".join(each) for text in said] for each in marks] == [
        [False, False],
        [True, False],
        [False, True],
    ]


def test_few_tokens_compute_a_whole_tile_where_operations_are_scarce():
    """From 1 to 64 tokens the dense MLP of an H20 takes what 64 tokens compute, no less."""
    operators = silicon_of("h20", family="deepseek-v3")
    shape = MicroBatch(request_count=1, queries_each=1, context=4096, parallel=NODE)
    dense = Kind(is_dense=True, has_indexer=False)
    weights = 3 * operators.family.layout.hidden_dim * operators.family.dense_dim
    least_us = 2 * weights * 64 / operators.machine.fp8_rate / 0.9
    times = [
        operators.stages(replace(shape, request_count=count), dense).experts
        for count in (1, 64, 65)
    ]
    assert times[0] >= least_us
    assert times[2] >= 2 * least_us - 1e-6
    assert [tiled(0.5), tiled(64), tiled(64.5)] == [64, 64, 128]


def test_prompts_in_the_same_step_make_it_longer():
    alone = step_us()
    chunked = [step_us(prompt_chunk=count, prompt_prefix=4096) for count in (256, 4096)]
    assert alone < chunked[0] < chunked[1]


def test_stages_of_a_pipeline_share_requests_and_pay_for_hops():
    whole = step_us(batch=4, parallel=NODE)
    halves = step_us(batch=2, parallel=Parallel(attention_dp=8, expert_ep=8, pp=2))
    assert halves < whole + 1000


def test_a_pass_over_prompts_grows_with_what_is_behind_and_overlap_helps():
    operators = silicon_of("h100", family="deepseek-v3")
    wide = Parallel.wide(32)
    sizes = {"parallel": wide, "tokens": 4096, "count": 4}
    first = pass_us(operators, PromptPass(**sizes))
    assert pass_us(operators, PromptPass(**sizes, prefix=32_768)) > 1.2 * first
    assert pass_us(operators, PromptPass(**sizes, overlap=True)) < 0.8 * first
    assert pass_us(operators, PromptPass(**sizes, groups=1)) < first


def test_a_tiers_time_is_that_of_its_passes():
    """Two passes fix it; a prompt in pieces takes as long, whatever its length."""
    operators, wide = silicon_of("h200", family="deepseek-v3.2"), Parallel.wide(32)
    time = prefill_time.time_of(operators, wide)
    for prompt in (8192, 65_536, 131_072):
        passes_s = prompt_us(operators, wide, prompt=prompt, overlap=True) / 1e6
        assert time.of(prompt) == pytest.approx(passes_s, rel=0.03)


def test_prompts_between_steps_hold_them_up_and_prompts_within_do_so_less():
    operators = silicon_of("h200", family="deepseek-v3")
    scenario = Scenario(batch=64, queries_each=1, context=2048, parallel=NODE, tbo=False)
    between = stall_us(operators, NODE, ended_each=0.5, prompt=1024, overlap=False)
    assert between == pytest.approx(
        stall_us(operators, NODE, ended_each=0.25, prompt=1024, overlap=False) * 2
    )
    assert 0 < mixed_us(operators, scenario, ended_each=0.5, prompt=1024) < between


def test_what_was_not_measured_is_refused_with_what_was():
    with pytest.raises(BadInput, match="'a100'; there are h100, h200, b200, gb200, h800, h20"):
        silicon_of("a100", family="deepseek-v3.2")
    with pytest.raises(BadInput, match=r"'llama'; there are deepseek-v3\.2, deepseek-v3"):
        silicon_of("h200", family="llama")
    with pytest.raises(
        BadInput, match=r"3 GPUs \(EP 1 x TP 3\) were not measured; .* EP 64 with TP 1$"
    ):
        step_us(parallel=Parallel(attention_dp=3, expert_tp=3), family="glm-5")
    with pytest.raises(BadInput, match="128 heads cannot be divided over attention TP 3"):
        step_us(parallel=Parallel(attention_tp=3, expert_tp=3))
    with pytest.raises(BadInput, match="nothing to offload"):
        step_us(family="deepseek-v3", misses=(1.0,) * 61)
    with pytest.raises(BadInput, match="0 prompts of 5 tokens"):
        PromptPass(parallel=NODE, tokens=5, count=0)
    with pytest.raises(BadInput, match="9 attention groups, there are 8"):
        PromptPass(parallel=NODE, tokens=5, groups=9)
