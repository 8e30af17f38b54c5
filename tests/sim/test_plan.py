from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ess.cost import bytes_per_us
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.weights.expected.dry_run import PUBLISHED
from ess.server.commands.cli import main
from ess.server.commands.planning.plan import parse_duration
from ess.sim import memory_budget, step_grid
from ess.sim.decode_step import Prediction, Scenario, simulate
from ess.sim.locality import misses
from ess.sim.memory_budget import Budget
from ess.sim.operators.paper import PaperOperators
from ess.sim.operators.stages import Machine, Operators
from ess.sim.planning import changes, planner
from ess.sim.planning.answers import Question, answered
from ess.sim.planning.ask import Ask
from ess.sim.planning.bands import EXACT
from ess.sim.planning.batches import Point, best, tried
from ess.sim.planning.changes import Setup, changed
from ess.sim.planning.deployment import Prefilling, Work
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Plan, Planner
from ess.sim.planning.planners import planner_of
from ess.sim.planning.prefilling import prefilling_of

GIB = 1 << 30


@pytest.fixture(scope="module")
def operators() -> PaperOperators:
    return PaperOperators()


def answer(operators: PaperOperators, *, as_paper: bool = False, **ask: float) -> Plan:
    return Planner(
        operators=operators,
        curves=misses.published(),
        ask=Ask(**ask),
        layout=ModelLayout.deepseek_v32(mtp=not as_paper),
        count_map=not as_paper,
    ).plan()


@pytest.mark.parametrize(
    ("context", "ratio", "batch"),
    [(32_768, 1.0, 54), (131_072, 1.0, 13), (131_072, 0.2, 40), (131_072, 0.1, 54)],
)
def test_the_papers_batch_limits(operators: PaperOperators, context: int, ratio: float, batch: int):
    """The paper rounds 54 at 32K down to a multiple of four."""
    slots = int(ratio * context)
    budget = Budget(
        layout=ModelLayout.deepseek_v32(mtp=False), device_bytes=80 * GIB, count_map=False
    )
    assert budget.batch_max(context=context, slots_each=slots) == batch
    plan = answer(operators, as_paper=True, context=context, batch=batch, device_bytes=80 * GIB)
    assert round(plan.chosen.ratio, 2) >= ratio
    assert plan.index_wall == (81 if context == 131_072 else 325)


def test_the_papers_ratios(operators: PaperOperators):
    ratios = [
        answer(
            operators, as_paper=True, context=32_768, batch=batch, device_bytes=80 * GIB
        ).chosen.ratio
        for batch in (64, 96, 128, 160)
    ]
    assert [round(ratio, 2) for ratio in ratios] == [0.82, 0.48, 0.31, 0.21]


def test_every_planned_batch_is_admitted_and_keeps_the_time(operators: PaperOperators):
    plan = answer(operators, context=131_072, token_us_max=45_000.0, host_bytes=8 << 40)
    assert plan.chosen.token_us <= 45_000.0
    assert plan.chosen.slots_each >= plan.slot_floor
    assert plan.chosen.host_bytes <= (8 << 40) // 32
    assert plan.gain is not None
    assert plan.gain > 1.0
    assert plan.resident is not None
    assert plan.resident.batch < plan.break_even_batch <= plan.chosen.batch


def test_host_memory_limits(operators: PaperOperators):
    plan = answer(operators, context=32_768, host_bytes=100 * GIB)
    assert (plan.chosen.batch, plan.limiter) == (2, "host pages")


def test_the_planner_names_its_own_limit(
    operators: PaperOperators, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory_budget, "BATCH_MAX", 8)
    for ask, limiter in (
        ({}, "the most requests that are planned"),
        ({"batch": 7}, "the batch asked for"),
    ):
        found = answer(operators, context=64, **ask)
        assert (found.chosen.batch, found.limiter) == (7, limiter)


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        ({"context": 131_072, "batch": 90}, r"index keys take 9\d.* device memory are missing"),
        ({"context": 131_072, "batch": 70}, r"batch of 70 .* slots .* device memory are missing"),
        ({"context": 131_072, "token_us_max": 20_000.0}, r"20.0 ms a token .* ms too many"),
        ({"context": 131_072, "gpu_count": 4}, r"weights on 4 GPUs .* are missing"),
        ({"context": 131_072, "gpu_count": 1}, r"weights on 1 GPU take"),
        ({"context": 32_768, "host_bytes": GIB}, r"GiB of host memory are missing per GPU"),
        ({"context": 131_072, "batch": 2, "ratio": 0.5}, "fixes the ratio"),
        ({"context": 131_072, "accepted": 2.5}, "between 1 and 2"),
        ({"context": 131_072, "ratio": 1.5}, r"outside 0\.\.1"),
        ({"context": 131_072, "queries_each": 64}, "mtp 64: .* at most 8"),
    ],
)
def test_impossible_asks_get_a_sentence(
    operators: PaperOperators, ask: dict[str, float], match: str
):
    with pytest.raises(BadInput, match=match):
        answer(operators, **ask)


def test_slots_below_the_floor_are_refused(operators: PaperOperators):
    """131 slots for 2,048 selected rows; with more queries a step the floor is their union."""
    with pytest.raises(BadInput, match=r"131 slots a layer .* the floor is 6,400"):
        answer(operators, context=131_072, ratio=0.001)
    with pytest.raises(BadInput, match=r"the floor is 8,192"):
        answer(operators, context=131_072, ratio=0.05, queries_each=4)
    assert answer(operators, context=131_072, queries_each=4).chosen.slots_each >= 8192
    assert answer(operators, context=131_072, ratio=0.05).chosen.slots_each == 6553


def test_host_memory_limits_offload_alone(operators: PaperOperators):
    """What keeps nothing on the host does not feel it: 64 GiB a GPU hold ten requests of 128K."""
    free = answer(operators, context=131_072)
    held = answer(operators, context=131_072, host_bytes=2 << 40)
    assert held.chosen.batch == 10
    assert (held.resident, held.index_wall) == (free.resident, free.index_wall)
    assert held.floor_batch == free.floor_batch
    assert held.gain is not None
    assert held.gain < 0.8
    assert held.recommended == "resident"
    assert free.recommended == "offload"


@pytest.mark.parametrize(("context", "limit_us"), [(131_072, 30_000.0), (32_768, 40_000.0)])
def test_no_batch_near_the_limit_is_skipped(
    operators: PaperOperators, context: int, limit_us: float
):
    """Below the batch at which memory runs out both systems do the same, so none is better; a grid
    that skips the best batch would make offload the worse of them, and yet recommend it."""
    plan = answer(operators, context=context, token_us_max=limit_us)
    assert plan.resident is not None
    assert (plan.chosen.batch, plan.gain) == (plan.resident.batch, 1.0)
    assert (plan.limiter, plan.recommended) == ("time per token", "resident")
    more = answer(operators, context=context, batch=plan.chosen.batch + 1)
    assert more.chosen.token_us > limit_us


def point_at(batch: int, *, rate: float) -> Point:
    return Point(
        batch=batch, slots_each=1, ratio=1.0, tbo=False, step_us=1.0, exposed_us=0.0,
        token_us=float(batch), tokens_per_s=rate, modes={}, host_bytes=0,
        band=EXACT, token_band=EXACT, rate_band=EXACT, exposed_ends_us=(0.0, 0.0), marks=(),
    )  # fmt: skip


def test_every_batch_beside_the_best_is_tried():
    """Rates that a grid of 24 cannot see: the best at 77, and 3 in 4 batches too slow."""

    def point_of(batch: int) -> Point:
        return point_at(batch, rate=1e6 - 1e3 * abs(batch - 77))

    points = tried(500, point_of, lambda point: point.token_us <= 110)
    assert best(points).batch == 77
    assert {110, 111} <= {point.batch for point in points}
    assert len(points) < 120
    assert [point.batch for point in points] == sorted({point.batch for point in points})


@pytest.mark.parametrize("most", [1, 4097, 50_000, 1_000_003])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.77, 1.0])
def test_few_of_many_batches_are_tried_and_the_best_is_found(most: int, share: float):
    """Rates with steps of 64, as kernels have them, and a peak at a share of all."""
    peak, slow = 1 + int(share * (most - 1)), 1 + int(0.9 * (most - 1))

    def point_of(batch: int) -> Point:
        return point_at(batch, rate=1e9 - abs(batch - peak) - 0.1 * (-batch % 64))

    points = tried(most, point_of, lambda point: point.batch <= slow)
    kept = range(1, slow + 1)
    near = range(max(1, peak - 200), min(slow, peak + 200) + 1) or kept[-200:]
    chosen = best(point for point in points if point.batch <= slow)
    assert chosen.batch == best(map(point_of, near)).batch
    assert {slow, min(slow + 1, most)} <= {point.batch for point in points}
    assert len(points) <= 600


def test_a_batch_held_back_by_time_moves_with_it(operators: PaperOperators):
    """One held back by memory does not: the accounts are the engine's own."""
    held = answer(operators, context=131_072, token_us_max=40_000.0)
    assert held.limiter == "time per token"
    assert held.batch_band[0] < 0.0 < held.batch_band[1]
    low, high = (
        answer(operators, context=131_072, token_us_max=40_000.0 / (1.0 + side)).chosen.batch
        for side in held.chosen.token_band[::-1]
    )
    ends = [held.chosen.batch * (1.0 + side) for side in held.batch_band]
    assert [low, high] == pytest.approx(ends, rel=0.05), "the largest, and the best of these"
    assert answer(operators, context=131_072).batch_band == EXACT


def test_assumed_acceptance_widens_time_per_token_and_rate_but_not_the_step(
    operators: PaperOperators,
):
    """1.67 to 1.93 tokens a step where 1.7 are assumed; given, they are exact."""
    ask = Ask(context=131_072)
    assert ask.accepted_band == pytest.approx((1.67 / 1.7 - 1, 1.93 / 1.7 - 1))
    assumed, given = (
        answer(operators, context=131_072, batch=40, **more).chosen
        for more in ({}, {"accepted": 1.7})
    )
    assert assumed.band == given.band == given.token_band
    assert given.band[0] < 0.0 < given.band[1]
    assert assumed.token_band[0] < given.token_band[0]
    assert assumed.rate_band[1] > given.rate_band[1]


def test_the_wait_for_the_link_is_said_at_half_and_twice_the_misses(operators: PaperOperators):
    chosen = answer(operators, context=32_768, batch=160).chosen
    few, many = chosen.exposed_ends_us
    assert few < chosen.exposed_us < many


def test_the_cliff_is_at_equal_slots_whatever_the_context():
    """3,277 slots: at 32K a measured ratio; of longer contexts only ten times as many were."""
    curves = misses.published()
    means = [curves.mean(context=context, slots=3277) for context in (32_768, 65_536, 131_072)]
    assert all(600 < mean < 720 for mean in means)
    below, above = (curves.mean(context=131_072, slots=slots) for slots in (13_107, 13_108))
    assert below == pytest.approx(above, rel=0.01)
    assert curves.mean(context=131_072, slots=131) >= 2048 - 131


def test_what_is_missing_is_what_would_have_been_enough(operators: PaperOperators):
    """The missing bytes, added, admit the batch."""
    with pytest.raises(BadInput) as refusal:
        answer(operators, context=131_072, batch=40, device_bytes=40 * GIB)
    amount = re.search(r"; ([\d.]+) GiB of", str(refusal.value))
    assert amount is not None
    for extra, fits in ((0.01, True), (-0.01, False)):
        enough = int((40 + float(amount[1]) + extra) * GIB)
        budget = Budget(layout=ModelLayout.deepseek_v32(), device_bytes=enough)
        short = budget.refusal(context=131_072, batch=40, slots_each=6400)
        assert (short is None) == fits


def test_the_command_prints_a_table_or_a_document(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--ctx", "128k", "--batch", "32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chosen"]["batch"] == 32
    assert document["chosen"]["modes"]
    assert document["question"]["ask"]["batch"] == 32
    table = (
        (Path(__file__).parents[2] / "docs/planning.md").read_text().split("## As a document")[1]
    )
    keys = [line.split("|")[1] for line in table.split("\n## ")[0].splitlines() if line[:1] == "|"]
    listed = set(re.findall(r"`(\w+)`", " ".join(keys)))
    assert {*document} == listed - {"pipeline", "what_if"} | {"schema"}
    assert document["schema"] == "ess.plan/1"
    assert main(["plan", "--ctx", "128k", "--batch", "32"]) == 0
    assert "index wall" in capsys.readouterr().out


BAND = r"[+-]\d+[+-]\d+%"
RANGE = r"\(\S+ to (?:no end|\S+)\)"
EXACTLY = {
    "the model is shared", "batch per group of heads", "slots per layer", "of the context",
    "host memory per node", "floor batch", "index wall", "decode GPUs", "prefill GPUs",
}  # fmt: skip
"""What the engine's own accounts say, and what the planner decides."""


def test_every_predicted_figure_has_a_band(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--rate", "20", "--tpot", "60ms", "--price-per-gpu-hour", "2"]) == 0
    tables = capsys.readouterr().out.split("\nhost memory limits")[0]
    named = [re.split(r"\s{2,}", line.strip()) for line in tables.splitlines() if line[:1].strip()]
    bare = {name for name, figure, *_ in named if not re.search(f"{BAND}|{RANGE}", figure)}
    assert bare == EXACTLY
    assert len(named) == 24


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (["plan"], 250),
        (["plan", "--rate", "20", "--tpot", "60ms"], 350),
        (["sim", "--rate", "1"], 50),
    ],
)
def test_an_answer_takes_few_simulated_steps(
    asked: list[str], most: int, monkeypatch: pytest.MonkeyPatch
):
    """At 2 ms each, so that an answer takes a second: all that grows with a question is steps."""
    counted = Counter[str]()

    def counting(operators: Operators, scenario: Scenario) -> Prediction:
        counted["steps"] += 1
        return simulate(operators, scenario)

    for module in (planner, step_grid):
        monkeypatch.setattr(module, "simulate", counting)
    assert main(asked) == 0
    assert 0 < counted["steps"] <= most


def test_a_normal_node_is_the_default_and_more_is_said(capsys: pytest.CaptureFixture[str]):
    """2 TiB for eight GPUs; what more would give, and what less than asked for gives."""
    said = {}
    for memory in ("2TiB", "4TiB"):
        assert main(["plan", "--node-ram", memory, "--json"]) == 0
        said[memory] = json.loads(capsys.readouterr().out)
    normal, large = said["2TiB"], said["4TiB"]
    assert 8 * normal["chosen"]["host_bytes"] <= 2 << 40 < 8 * large["chosen"]["host_bytes"]
    assert normal["limiter"] == "host pages"
    in_words = f"batch {normal['chosen']['batch']}, x{normal['gain']:.2f} over resident"
    assert in_words in " ".join(large["advice"])
    in_words = f"batch {large['chosen']['batch']}, x{large['gain']:.2f} over resident"
    assert f"{in_words} as TP1 x DP16, EP16, PP2" in " ".join(normal["advice"])
    assert (normal["parallel"]["pp"], large["parallel"]["pp"]) == (1, 2)
    assert main(["plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == normal


def test_changes_are_planned_as_if_they_had_been_asked(monkeypatch: pytest.MonkeyPatch):
    ask = Ask(context=65_536, batch=4, host_bytes=8 << 40, device_bytes=4 << 30)
    question = Question(node=Node(), work=Work(context=65_536))

    def planner_for(setup: Setup) -> Planner:
        if setup.ask.queries_each == 1:
            raise BadInput("no drafts, no plan")
        return planner_of(setup.ask, setup.gpu, setup.node)

    def prefilling_for(planner: Planner) -> Prefilling:
        if planner.ask.host_bytes == 4 << 40:
            raise BadInput("no GPU prefills")
        return prefilling_of(planner)

    monkeypatch.setattr(changes, "prefilling_of", prefilling_for)
    setup = Setup(ask=ask, node=question.node, gpu="h200")
    change_of = {each.name: each for each in changed(setup, question, planner_for)}
    assert len(change_of) == 10
    assert {name for name, each in change_of.items() if each.refused} == {
        "--mtp 1",
        "--gpus 16, their memory alike",
        "host memory: half",
    }
    alone = {
        "as asked": setup,
        "host link: half, as PCIe 4": replace(setup, node=Node(link_rate=bytes_per_us(37.0) / 2)),
        "--mtp 4": replace(setup, ask=replace(ask, queries_each=4)),
    }
    for name, other in alone.items():
        answer = answered(planner_for(other), replace(question, node=other.node))
        assert (change_of[name].plan, change_of[name].all_gpus) == (answer.plan, answer.all_gpus), (
            name
        )
    waits = [
        change_of[name].plan.chosen.exposed_us for name in ("host link: twice, as PCIe 6", *alone)
    ]
    assert waits[0] <= waits[1] <= waits[2]


def test_it_says_so_where_resident_is_better(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--ram", "2TiB"]) == 0
    assert "run resident, batch 14" in capsys.readouterr().out


def test_a_node_shares_its_memory_and_the_link_between_sockets():
    """Eight GPUs of 40 GB/s need 320; of four on one socket half crosses to the other."""
    machine = Machine(link_rate=40e3)

    def limit(**changes: object) -> tuple[str, float]:
        limits = Node(**changes).fetch_limits(machine, gpus=32)
        return min((rate, name) for name, rate in limits.items())[::-1]

    assert limit() == ("host link", 40e3)
    assert limit(dram_rate=240e3) == ("node DRAM", 30e3)
    assert limit(dram_rate=240e3, gpu_count=4) == ("host link", 40e3)
    assert limit(numa="interleaved", socket_rate=40e3) == ("socket link", 20e3)
    assert limit(link_rate=10e3) == ("host link", 10e3)
    shares = [Node().host_bytes_of(gpus) for gpus in (4, 8, 12, 300)]
    assert shares == [2 << 40, 2 << 40, 3 << 40, 75 << 40], "no GPU gets more than in a full node"
    with pytest.raises(BadInput, match="NIC rate of 0"):
        Node(nic_rate=0.0)


def test_a_gpu_comes_in_its_own_node(capsys: pytest.CaptureFixture[str]):
    """Four GB200 share the memory of two Grace CPUs; a figure that is given replaces that alone."""
    assert main(["plan", "--gpu", "gb200", "--dram-rate", "500", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    node = told["question"]["node"]
    assert (node["gpu_count"], node["host_bytes"]) == (4, 960 * 10**9)
    assert (node["dram_rate"], node["nic_rate"]) == (500e3, 200e3)
    assert told["question"]["ask"]["host_bytes"] == 8 * 960 * 10**9
    assert 4 * told["chosen"]["host_bytes"] <= 960 * 10**9 < 4.2 * told["chosen"]["host_bytes"]
    assert "Grace" in told["sources"]["host memory"]
    assert [mark for mark in told["marks"] if mark.startswith("GB200")]


def test_another_gpu_is_planned_in_its_own_node():
    ask = Ask(context=65_536, host_bytes=Node().host_bytes_of(32))
    others = dict(changes.changes(Setup(ask=ask, node=Node(), gpu="h200")))
    rack = others["--gpu gb200, in its node"]
    assert (rack.node.gpu_count, rack.ask.host_bytes) == (4, 8 * 960 * 10**9)
    assert others["--gpu b200"].node == Node()
    own = dict(changes.changes(replace(rack, ask=replace(rack.ask, host_bytes=1 << 40))))
    assert own["--gpu h200, in its node"].ask.host_bytes == 1 << 40, "as --ram says"
    assert not [name for name in own if "DDR4" in name or "PCIe" in name]
    given = changes.changes(Setup(ask=ask, node=Node(dram_rate=1e5), gpu="h200"))
    assert [name for name, _ in given if "gpu " in name] == [
        f"--gpu {gpu}" for gpu in ("h100", "b200", "h800", "h20")
    ]


def test_counts_are_not_rounded(capsys: pytest.CaptureFixture[str]):
    for command in (["plan"], ["sim", "--rate", "1"]):
        assert main([*command, "--gpus", "32.5"]) == 2
        assert capsys.readouterr().err == "ess: --gpus 32.5 is not a whole number\n"


@pytest.mark.parametrize("text", ["50", "0ms", "-1ms", "fast"])
def test_times_need_a_unit(text: str):
    with pytest.raises(BadInput, match="must be a time above 0"):
        parse_duration(text, "--tpot")
    assert main(["plan", "--ttft", text]) == 2


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--model", "llama"]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith("ess: no operator tables for 'llama'; there are deepseek-v3.2, ")
    assert all(name in refusal for name in PUBLISHED), "what fits is planned for these"
