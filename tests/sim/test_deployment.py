"""Decode and prefill counted together: by hand, and against queues and limits that are known."""

from __future__ import annotations

import heapq
import json
import math
import random
from dataclasses import replace
from functools import partial

import pytest

from ess.engine.chunking.sizes import PrefillTime
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.server.commands.cli import main
from ess.sim.locality import misses
from ess.sim.operators.families import FAMILIES
from ess.sim.operators.gpus import silicon_of
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.ask import Ask
from ess.sim.planning.bands import EXACT, inverse, joined, miss_marks, moved
from ess.sim.planning.batches import Point
from ess.sim.planning.deployment import Deployment, Prefilling, Work, compared, gain_band
from ess.sim.planning.fleet import FleetGoal, fewest, late_wait_s, smallest_tier
from ess.sim.planning.fleets import _sizes, fleets
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.planners import planner_of
from ess.sim.planning.prefilling import least_group, prefilling_in, prefilling_of
from ess.sim.planning.ways import CLEARLY, best_way, ways
from ess.sim.planning.weights import weight_bytes
from ess.sim.prefill.prefill_time import FAR

SECOND_A_THOUSAND = Prefilling(time=PrefillTime(quadratic=1e-12, linear=1e-3), band=(0.0, 0.5))
WORK = Work(context=11_264, output_tokens=1024, cached_share=0.5)


def point(tokens_per_s: float, *, batch: int = 10, step_us: float = 50e3) -> Point:
    return Point(
        batch=batch,
        slots_each=6400,
        ratio=0.5,
        tbo=False,
        step_us=step_us,
        exposed_us=0.0,
        token_us=step_us / 1.7,
        tokens_per_s=tokens_per_s,
        modes={},
        host_bytes=0,
        band=(-0.1, 0.2),
        token_band=(-0.1, 0.2),
        rate_band=inverse((-0.1, 0.2)),
        exposed_ends_us=(0.0, 0.0),
        marks=(),
    )


def deployment(**changes: object) -> Deployment:
    settings = {
        "work": WORK,
        "prefilling": SECOND_A_THOUSAND,
        "layout": ModelLayout.deepseek_v32(),
        "node": Node(),
        "gpu_count": 32,
    }
    return Deployment(**(settings | changes))


@pytest.fixture(scope="module")
def planner() -> Planner:
    operators = silicon_of("h200", family="deepseek-v3.2")
    return Planner(
        operators=operators,
        curves=misses.published(),
        ask=Ask(context=131_072),
        layout=operators.family.layout,
    )


def test_prefill_gpus_are_counted_by_hand():
    """10,240 prompt tokens, half of them cached: 5,119 to compute, 5.119 s of one GPU. A decode GPU
    of 1,024 tokens a second ends one request a second, so 5.119 prefill for it; of 512, half."""
    assert (WORK.prompt_tokens, WORK.computed_tokens) == (10_240, 5119)
    both = compared(deployment(price=3.6), point(1024.0), point(512.0))
    assert both.offload.prefill_gpus == pytest.approx(5.119, rel=1e-3)
    assert both.offload.tokens_per_s == pytest.approx(1024 / 6.119, rel=1e-3)
    assert both.resident is not None
    assert both.resident.tokens_per_s == pytest.approx(512 / (1 + 5.119 / 2), rel=1e-3)
    assert both.gain == pytest.approx((2 + 5.119) / (1 + 5.119), rel=1e-3)
    per_token = 3.6 / 3600 / both.offload.tokens_per_s
    assert both.offload.cost_per_million == pytest.approx(1e6 * per_token)
    assert compared(deployment(), point(1024.0), None).gain is None
    assert deployment().shared(point(1024.0)).cost_per_million is None, "no price is assumed"


def test_bands_of_all_gpus_by_hand():
    """5.119 prefill GPUs to one that decodes, which is off by -1/6 to 1/9, prefill by up to half:
    what they need moves as much, the rate of all only by the part that each has in it."""
    shared = deployment(price=3.6).shared(point(1024.0))
    assert shared.prefill_band == pytest.approx((-1 / 6, math.hypot(1 / 9, 0.5)), rel=1e-6)

    def rate(decode: float, prefill: float) -> float:
        return decode / (1 + 5.119 * decode * prefill) * 6.119 - 1

    low = -math.hypot(rate(5 / 6, 1.0), rate(1.0, 1.5))
    assert shared.band == pytest.approx((low, rate(10 / 9, 1.0)), rel=1e-3)
    assert shared.cost_band == inverse(shared.band)


def test_without_prefill_the_gain_is_that_of_decode():
    everything = deployment(work=replace(WORK, cached_share=1.0))
    both = compared(everything, point(1000.0), point(500.0))
    assert both.gain == pytest.approx(2.0, rel=0.1)


def test_the_network_of_a_node_limits_by_name():
    """5,119 rows and keys of 48,856 bytes each are 250 MB a request; 8 GPUs share 1 GB/s."""
    held = deployment(node=Node(nic_rate=1e3)).shared(point(1024.0))
    assert held.limiter == "NIC"
    assert held.requests_per_s * (1 + held.prefill_gpus) == pytest.approx(0.5, rel=0.01)
    assert deployment().shared(point(1024.0)).limiter is None


def test_bands_are_joined_as_by_hand():
    assert inverse((-0.5, 1.0)) == (-0.5, 1.0)
    assert joined([(-0.3, 0.4), (-0.4, 0.3)]) == pytest.approx((-0.5, 0.5))
    halves = moved(lambda own, other: own + other, own=(-0.2, 0.2), other=EXACT)
    assert halves == pytest.approx((-0.1, 0.1))
    assert moved(lambda part: 0.0 * part, part=(-0.2, 0.2)) == EXACT
    exact = EXACT
    assert gain_band((1.0, exact), (2.0, exact), (5.0, exact)) == exact
    both = gain_band((1.0, exact), (2.0, exact), (1.0, exact), accepted=(0.0, 1.0))
    assert both == pytest.approx((4 / 3 / 1.5 - 1, 0.0)), "twice the tokens need twice the prefill"
    low, high = gain_band((1.0, exact), (2.0, exact), (1.0, (0.0, 1.0)))
    assert (low, high) == pytest.approx((4 / 3 / 1.5 - 1, 0.0)), "twice the prefill dilutes"
    assert gain_band((1.0, (-0.1, 0.1)), (2.0, exact), (0.0, exact)) == pytest.approx(
        (1 / 1.1 - 1, 1 / 0.9 - 1)
    )


@pytest.mark.parametrize(("pipelines", "load"), [(1, 0.6), (3, 2.4), (12, 10.0)])
def test_the_queue_of_a_tier_is_that_of_a_simulation(pipelines: int, load: float):
    """Poisson arrivals, one second each: nine in ten wait no longer, within a tenth of a second or
    a seventh. Eight in ten would wait clearly less."""
    draw = random.Random(pipelines)
    free, now, waits = [0.0] * pipelines, 0.0, []
    for _ in range(60_000):
        now += draw.expovariate(load)
        begun = max(now, heapq.heappop(free))
        heapq.heappush(free, begun + 1.0)
        waits.append(begun - now)
    simulated = sorted(waits)[int(0.9 * len(waits))]
    assert late_wait_s(pipelines, load, 1.0) == pytest.approx(simulated, rel=0.15, abs=0.1)


def test_the_smallest_tier_meets_the_objective_and_one_less_does_not():
    wanted = FleetGoal(rate=3.0, ttft_s=4.0)

    def through(stages: int) -> tuple[float, float]:
        return 2.0 / stages, 2.4 / stages + 1.0

    tier = smallest_tier(wanted, through, first_step_s=0.05)
    assert tier.first_token_s <= 4.0
    assert tier.load <= 0.9
    for stages in (1, 2, 4):
        fewer = (tier.gpu_count - 1) // stages
        busy_s, ready_s = through(stages)
        load = wanted.rate * busy_s
        assert load > 0.9 * fewer or late_wait_s(fewer, load, busy_s) + ready_s + 0.05 > 4.0
    for group in (8, 24, 64):
        whole = smallest_tier(wanted, through, first_step_s=0.05, group=group)
        assert whole.gpu_count % group == 0
        assert tier.gpu_count <= whole.gpu_count < tier.gpu_count + group
    with pytest.raises(BadInput, match=r"within 1 s is out of reach: .* takes 1\.2 s"):
        smallest_tier(FleetGoal(rate=3.0, ttft_s=1.0), through, first_step_s=0.05)


def test_a_fleet_has_whole_groups_with_something_to_spare():
    """A GPU ends a request a second, 8 of them 8: 90 % of two groups are 14.4 requests a second."""
    for rate, groups in ((7.0, 1), (7.3, 2), (14.3, 2), (14.5, 3)):
        fleet = fewest(
            point(1024.0),
            8,
            work=WORK,
            wanted=FleetGoal(rate=rate, ttft_s=9.0),
            through=lambda stages: (1.0, 1.0),
        )
        assert (fleet.decode.count, fleet.decode.gpu_count) == (groups, 8 * groups)
        assert fleet.decode.load <= 0.9


def test_prefill_runs_in_the_group_that_is_fastest_for_each_gpu(planner: Planner):
    """16 GPUs send tokens to experts where 8 gather them; 32 are no faster, and pay for it."""
    chosen = prefilling_of(planner)
    eight, wide = (prefilling_in(planner, gpus) for gpus in (8, 32))
    assert chosen.group_gpus == 16
    assert chosen.time.of(FAR) < 0.7 * eight.time.of(FAR)
    assert chosen.time.of(FAR) < wide.time.of(FAR)


def test_few_requests_are_prefilled_in_the_smallest_group(planner: Planner):
    few, many = (
        fleets(
            planner,
            prefilling=prefilling_of(planner),
            node=Node(),
            work=Work(context=131_072),
            wanted=FleetGoal(rate=rate, ttft_s=30.0),
        ).offload
        for rate in (0.5, 20.0)
    )
    assert (few.prefill_group, few.fleet.prefill.gpu_count) == (8, 8)
    assert many.prefill_group == 16
    assert many.fleet.prefill.gpu_count % 16 == 0


def test_a_group_that_prefills_holds_the_weights():
    """Eight H100 do not."""
    node = Node()
    planner = planner_of(Ask(context=32_768, host_bytes=node.host_bytes_of(32)), "h100", node)
    side = fleets(
        planner,
        prefilling=prefilling_of(planner),
        node=node,
        work=Work(context=32_768),
        wanted=FleetGoal(rate=0.5, ttft_s=30.0),
    ).offload
    assert (side.prefill_group, least_group(planner)) == (16, 16)


def test_groups_whose_first_step_comes_too_late_are_passed_over(planner: Planner):
    """Idle pipelines take 0.73 s at 32K, and first steps 0.06 to 0.13 s, by the decode group."""
    short = replace(planner, ask=replace(planner.ask, context=32_768))
    search = partial(
        fleets,
        short,
        prefilling=prefilling_of(planner),
        node=Node(),
        work=Work(context=32_768),
    )
    first_s = search(wanted=FleetGoal(rate=2.0, ttft_s=0.82)).offload.fleet.prefill.first_token_s
    assert 0.79 < first_s <= 0.82
    with pytest.raises(BadInput, match=r"a first token within 0\.79 s is out of reach"):
        search(wanted=FleetGoal(rate=2.0, ttft_s=0.79))


def test_a_whole_rack_may_decode_as_one_group():
    tried = {
        gpu: {sized.ask.gpu_count for sized in _sizes(planner_of(Ask(context=8192), gpu, Node()))}
        for gpu in ("b200", "gb200")
    }
    assert tried["gb200"] - tried["b200"] == {72}
    assert tried["b200"] <= tried["gb200"]


def test_the_fewest_gpus_and_their_first_token_have_ends(planner: Planner):
    """Each tier moves by what its time is off; a tier that runs at 90 % never ends its queue if
    prefill takes 15 % longer, and one for a slow rate does."""
    work = Work(context=131_072)
    paced = replace(planner, ask=replace(planner.ask, token_us_max=60e3, host_bytes=8 << 40))
    fleet_at = {
        rate: fleets(
            paced,
            prefilling=prefilling_of(planner),
            node=Node(),
            work=work,
            wanted=FleetGoal(rate=rate, ttft_s=30.0),
        ).offload
        for rate in (0.5, 20.0)
    }
    for side in fleet_at.values():
        low, high = side.gpu_ends
        assert high is not None
        assert low <= side.fleet.gpu_count <= high
        assert side.first_token_ends_s[0] < side.fleet.prefill.first_token_s
    low, high = fleet_at[20.0].gpu_ends
    prefill = fleet_at[20.0].fleet.prefill.gpu_count * fleet_at[20.0].prefill_band[1]
    assert high is not None
    assert high - fleet_at[20.0].fleet.gpu_count >= 0.9 * prefill > 10
    assert fleet_at[20.0].first_token_ends_s[1] is None
    assert fleet_at[0.5].first_token_ends_s[1] is not None


def test_weights_are_those_of_the_models():
    """671 and 14 billion parameters of DeepSeek-V3 and its MTP layer, 744 of GLM-5."""
    alone = {name: weight_bytes(family, Parallel.wide(1)) for name, family in FAMILIES.items()}
    assert alone["deepseek-v3"] == pytest.approx(686e9, rel=0.01)
    assert alone["glm-5"] == pytest.approx(754e9, rel=0.01)
    v32 = FAMILIES["deepseek-v3.2"]
    assert weight_bytes(v32, Parallel.wide(32)) == pytest.approx(41e9, rel=0.01)
    assert weight_bytes(v32, Parallel.wide(8)) > weight_bytes(
        v32, Parallel(attention_tp=8, expert_ep=8)
    )
    assert weight_bytes(v32, Parallel(attention_dp=8, expert_ep=8, pp=2)) < 0.52 * weight_bytes(
        v32, Parallel.wide(8)
    )


def test_every_way_uses_all_gpus_and_wide_is_the_first():
    for gpus in (8, 32, 256):
        tried = list(ways(gpus))
        assert tried[0] == Parallel.wide(gpus)
        assert {way.gpu_count for way in tried} == {gpus}
        assert len(set(tried)) == len(tried)


def test_the_best_way_is_no_worse_than_any(planner: Planner):
    """With offload and without, each its own."""
    plan = best_way(planner).plan()
    wide = planner.plan()
    assert plan.chosen.tokens_per_s >= wide.chosen.tokens_per_s
    assert plan.resident is not None
    assert wide.resident is not None
    assert plan.resident.tokens_per_s >= wide.resident.tokens_per_s


def test_more_host_memory_never_makes_fewer_tokens():
    """Beyond what one way must be better than a plainer one by. Behind a slow link the largest
    batch of a way may be too large, so that it says little about the way's best."""
    node = Node(link_rate=20e3)
    ask = Ask(context=65_536, queries_each=3, host_bytes=node.host_bytes_of(32))
    asks = (ask, replace(ask, host_bytes=2 * node.host_bytes_of(32)))
    less, more = (best_way(planner_of(each, "h200", node, model="glm-5")).plan() for each in asks)
    assert CLEARLY * more.chosen.tokens_per_s >= less.chosen.tokens_per_s


def test_what_misses_rest_on_is_marked():
    curves = misses.published()

    def marks(slots: int, model: str = "deepseek-v3.2", **ask: int) -> str:
        return " ".join(miss_marks(curves, Ask(**ask), slots_each=slots, model=model))

    assert marks(26_000, context=131_072) == ""
    assert "32,768 to 131,072" in marks(26_000, context=524_288)
    assert "misses of 4 tokens a step" in marks(26_000, context=131_072, queries_each=4)
    assert "shorter context" in marks(8000, context=131_072)
    assert "misses of glm-5" in marks(26_000, "glm-5", context=131_072)
    stretched = misses.published(layer_count=78)
    assert len(stretched.layers(context=131_072, slots=13_107, queries_each=2)) == 78
    assert sum(stretched.shapes[131_072]) == pytest.approx(78)


def test_the_command_counts_all_gpus_and_asks_for_the_price(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--json", "--rate", "20", "--ttft", "9s"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["question"]["wanted"] == {"rate": 20.0, "ttft_s": 9.0}
    shared = told["all_gpus"]
    assert 1.0 < shared["gain"] < told["gain"]
    assert shared["offload"]["cost_per_million"] is None
    assert shared["gain_band"][0] < 0.0 < shared["gain_band"][1]
    assert told["sources"]["host memory"].startswith("2 TiB a node")
    assert main(["plan", "--price-per-gpu-hour", "2", "--rate", "20", "--tpot", "60ms"]) == 0
    shown = capsys.readouterr().out
    assert "cost per million tokens" in shown
    assert "fewest GPUs" in shown


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--price-per-gpu-hour", "-1"], "price of -1"),
        (["--out", "131072"], "an output of 131,072 tokens in a context of 131,072"),
        (["--cached", "1.5"], "cached share of 1.5"),
        (["--rate", "0"], "a rate of 0 requests"),
        (["--rate", "1", "--ttft", "1ms"], "out of reach"),
        (["--rate", "90000"], "pipelines of 1 GPU busy; at most 15,360 can be planned"),
        (["--gpus", "7"], "EP 1, 2 or 4 with TP 1, 2, 4, 8 or 16;"),
        (["--attention-tp", "3"], "--gpus 32 do not divide evenly by --attention-tp 3"),
        (["--attention-tp", "0"], "--attention-tp 0, --expert-tp 1 and --decode-pp 1"),
        (["--decode-pp", "0"], "--decode-pp 0"),
        (["--dram-rate", "0"], "DRAM rate of 0 GB/s"),
    ],
)
def test_wrong_asks_get_a_sentence(asked: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *asked]) == 2
    assert says in capsys.readouterr().err
