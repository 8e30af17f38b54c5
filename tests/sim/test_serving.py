"""`ess sim`: simulated step times under arrivals, beside the planner, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ess.layout import ModelLayout
from ess.server.commands.cli import main
from ess.sim.locality import misses
from ess.sim.operators.gpus import silicon_of
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.ask import Ask
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.prefilling import prefilling_of
from ess.sim.prefill.prefill_time import FIRST_CHUNK
from ess.sim.prefill.prompt_pass import PromptPass, pass_us
from ess.sim.serving import comparison
from ess.sim.serving.arrivals import Arrival
from ess.sim.serving.comparison import Served
from ess.sim.serving.goodput import Objective
from ess.sim.serving.lines import SPANS_MAX, Lines, Span
from ess.sim.serving.replay_settings import AUTO, Serving
from ess.sim.serving.traffic import Mix, at_rate, draw
from ess.sim.serving.worker import RATE_MAX
from ess.sim.step_grid import StepTimes
from tests.support import chromium
from tests.support.few import few

OBJECTIVE = Objective(ttft_s=10.0, tpot_s=0.06)


def serve(planner: Planner, arrivals: list[Arrival], serving: Serving, **how: bool) -> Served:
    return comparison.serve(planner, arrivals, serving, node=Node(), **how)[0]


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(
        operators=silicon_of("h200", family="deepseek-v3.2"),
        curves=misses.published(),
        ask=Ask(context=131_072),
        layout=ModelLayout.deepseek_v32(),
    )


@pytest.mark.parametrize(
    ("batch", "context", "slots", "error"),
    [(64, 131_072, 131_072, 1e-9), (40, 32_768, 6400, 0.01), (57, 90_000, 8000, 0.03)],
)
def test_steps_between_grid_points_are_the_planners(
    planner: Planner, batch: int, context: int, slots: int, error: float
):
    here = replace(planner, ask=Ask(context=context))
    times = StepTimes(
        operators=planner.operators, curves=planner.curves, parallel=Parallel.wide(32)
    )
    missed = planner.curves.mean(context=context, slots=slots)
    point = times.at(requests=batch, queries=2, context=context, misses=missed)
    assert point.step_us == pytest.approx(here.point(batch, slots).step_us, rel=error)


WAYS = {
    "wide": Parallel.wide(32),
    "heads": Parallel(attention_tp=4, attention_dp=8, expert_ep=32),
    "parts": Parallel(attention_tp=8, expert_tp=8),
    "stages": Parallel(attention_dp=16, expert_ep=16, pp=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_saturated_rank_does_what_the_planner_says(planner: Planner, way: str):
    """Two full batches arrive at once: batch and tokens a second are those of `ess plan`, for each
    GPU that decodes.

    3 % for the drafts of a finite number of steps, and since the mean context is a little less.
    """
    shared = WAYS[way]
    here = replace(planner, ask=Ask(context=131_072, gpu_count=shared.gpu_count, parallel=shared))
    most = here.budget.batch_max(context=131_072, slots_each=6400)
    mix = Mix(rate=1e6, count=2 * most, prompt_tokens=130_816, output_tokens=256)
    serving = Serving(objective=OBJECTIVE, tier=(1024, 61))
    served = serve(here, draw(mix, seed=0), serving)
    point = here.point(most, here.budget.slots_each(context=131_072, batch=most))
    busy_s = served.offload.seconds * served.offload.busy_share
    made = 2 * most * 256 / busy_s / shared.attention_tp
    assert served.offload.batch_peak == most
    assert made == pytest.approx(point.tokens_per_s, rel=0.03)
    assert served.offload.tokens_per_s > 1.2 * served.resident.tokens_per_s
    assert served.gpu_count == shared.attention_tp + 1024 * 61
    assert served.parallel == shared


@pytest.mark.slow
def test_what_is_sustained_is_and_a_fifth_more_is_not(planner: Planner):
    arrivals = draw(Mix(rate=1.0, count=80, prompt_tokens=130_048, output_tokens=512), seed=0)
    serving = Serving(objective=OBJECTIVE, tier=(8, 8), cached_share=0.95)
    served = serve(planner, arrivals, serving, sustained=True)
    offload, resident = served.sustained
    for rate, (good, bad) in zip(served.sustained, served.sustained_ends, strict=True):
        assert good.rate >= rate.rate >= bad.rate
        assert good.rate > bad.rate
    assert offload.rate > 2.0 * resident.rate > 0.0
    assert offload.gpu_count == resident.gpu_count == 65
    for rate, is_met in ((offload.rate, True), (1.2 * offload.rate, False)):
        again = serve(planner, at_rate(arrivals, rate), serving).offload
        assert (again.good_share >= 0.9) == is_met
    few = serve(planner, arrivals[:20], serving, sustained=True).sustained
    assert few is not None
    assert few[0].rate == RATE_MAX > few[1].rate
    out_of_reach = replace(serving, objective=Objective(ttft_s=1e-3, tpot_s=0.06))
    assert serve(planner, arrivals[:4], out_of_reach, sustained=True).sustained == (
        (0.0, 1),
        (0.0, 1),
    )


def test_a_replay_has_ends(planner: Planner):
    """Everything better than predicted, and everything worse; a tier that is sized, too."""
    mix = Mix(rate=2.0, count=40, prompt_tokens=131_072, output_tokens=256)
    serving = Serving(objective=OBJECTIVE, tier=AUTO, cached_share=0.9)
    served = serve(planner, draw(mix, seed=0), serving)
    for side, (good, bad) in (
        (served.offload, served.offload_ends),
        (served.resident, served.resident_ends),
    ):
        for name in ("ttft_s", "tpot_s"):
            times = [getattr(each, name).p90 for each in (good, side, bad)]
            assert times == sorted(set(times)), "each longer than the one before"
        assert good.tokens_per_s >= side.tokens_per_s >= bad.tokens_per_s
        assert good.good_share >= side.good_share >= bad.good_share
    fewer, more = served.gpu_ends
    assert fewer is not None
    assert more is not None
    assert fewer < served.gpu_count < more
    assert served.offload_ends[0].misses_mean < served.offload.misses_mean
    given = replace(serving, tier=(2, 4))
    assert serve(planner, draw(mix, seed=0), given).gpu_ends == (9, 9)


def test_without_pressure_offload_changes_nothing(planner: Planner):
    mix = Mix(rate=0.5, count=12, prompt_tokens=8192, output_tokens=64)
    served = serve(planner, draw(mix, seed=0), Serving(objective=OBJECTIVE))
    assert served.offload == served.resident
    assert served.offload.misses_mean == 0.0


def test_prefill_takes_what_a_pass_takes(planner: Planner):
    """A prompt in chunks, behind each other: what their passes take, to a twentieth."""
    prefilling = prefilling_of(planner)
    time, way = prefilling.time, Parallel.wide(prefilling.group_gpus)
    passes = [
        PromptPass(parallel=way, tokens=FIRST_CHUNK, prefix=prefix, overlap=True)
        for prefix in range(0, 131_072, FIRST_CHUNK)
    ]
    seconds = sum(pass_us(planner.operators, each) for each in passes) / 1e6
    assert time.of(131_072) == pytest.approx(seconds, rel=0.05)
    assert time.of(131_072) > 4.2 * time.of(32_768)


@pytest.mark.parametrize("prefill", ["2x2", "beside"])
def test_the_same_seed_prints_the_same_bytes(prefill: str, capsys: pytest.CaptureFixture[str]):
    def said(seed: int) -> str:
        asked = ["--rate", "0.5", "--requests", "8", "--out", "40", "--prefill", prefill]
        assert main(["sim", *asked, "--spread", "0.5", "--seed", str(seed), "--json"]) == 0
        return capsys.readouterr().out

    once = said(1)
    assert once == said(1) != said(2)
    assert json.loads(once)["offload"]["served_count"] == 8


def test_a_trace_is_replayed_at_the_rate_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 900, "output_length": 20, "hash_ids": []}\n'
    trace.write_text("".join(line % (1000 * number) for number in range(6)))
    assert main(["sim", "--trace", str(trace), "--rate", "0.5", "--requests", "4"]) == 0
    shown = capsys.readouterr().out
    assert "of 4 that arrive in 6 s" in shown
    assert "further tokens" in shown


def test_prefill_is_sized_by_the_objective_and_counted(planner: Planner):
    """Rates are those of all GPUs: as many as it takes, by the planner's own search, and one that
    decodes. With one GPU fewer a tenth of the requests see their first token too late."""
    arrivals = draw(Mix(rate=0.8, count=300, prompt_tokens=32_768, output_tokens=64), seed=1)
    serving = Serving(objective=OBJECTIVE, tier=AUTO)
    served = serve(planner, arrivals, serving)
    pipelines, stages = served.prefill
    assert served.gpu_count == 1 + pipelines * stages
    assert served.resident.ttft_s is not None
    assert served.resident.ttft_s.p90 <= OBJECTIVE.ttft_s
    busy = served.prefill_tokens_per_s
    assert served.gpu_count - 1 >= 0.8 * 32_768 / busy, "prefill cannot make more than it can"
    given = serve(planner, arrivals, replace(serving, tier=served.prefill))
    assert given == replace(served, gpu_ends=given.gpu_ends)
    fewer = (1, pipelines * stages - 2)
    late = serve(planner, arrivals, replace(serving, tier=fewer)).resident.ttft_s
    assert late is not None
    assert late.p90 > OBJECTIVE.ttft_s


def test_a_line_keeps_what_was_seen_in_few_spans():
    """5,000 steps, half of them with a batch of 3: sums over time stay what they were."""
    lines = Lines()
    for step in range(5000):
        lines.add(Span(2.0 * step, 2.0, 3.0 if step < 2500 else 1.0, step % 2, 0.0, 0.5))
    assert 200 < len(lines.spans) <= SPANS_MAX
    assert sum(span.seconds for span in lines.spans) == pytest.approx(10_000.0)
    weighted = sum(span.seconds * span.batch for span in lines.spans)
    assert weighted == pytest.approx(2.0 * 2500 * (3 + 1))
    assert [span.start_s for span in lines.spans] == sorted(span.start_s for span in lines.spans)
    assert lines.spans[0].batch == 3.0
    assert lines.spans[-1].batch == 1.0
    assert {round(span.waiting, 3) for span in lines.spans} == {0.5}


def drawn(folder: Path) -> Path:
    out = folder / "replay.html"
    asked = [
        "--rate",
        "0.8",
        "--ctx",
        "128k",
        "--out",
        "256",
        "--cached",
        "0.9",
        "--requests",
        "60",
        "--attention-tp",
        "4",
    ]
    assert main(["sim", *asked, "--html", str(out)]) == 0
    return out


def test_the_page_holds_all_it_shows(tmp_path: Path):
    html = drawn(tmp_path).read_text()
    assert not re.search(r"(?:src|href)\s*=|https?://|@import|fetch\(", html)
    script = re.search(r'application/json">(.*?)</script>', html, re.DOTALL)
    assert script is not None
    numbers = json.loads(script[1])
    assert "TP4 x DP8, EP32" in numbers["about"]
    assert numbers["decoding"] == 4
    assert [side["name"] for side in numbers["sides"]] == ["with offload", "resident"]
    for side in numbers["sides"]:
        assert len(side["firsts"]) == 60
        assert 10 < len(side["spans"]) <= SPANS_MAX
    assert main(["sim", "--rate", "1", "--html", "no/such/folder/p.html"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(chromium.path() is None, reason="no Chromium")
def test_the_page_draws_five_lines_in_a_browser(tmp_path: Path):
    """One chart each for batch, waiting, misses, link and first token, two colours in each."""
    out = drawn(tmp_path)
    with chromium.Browser() as browser:
        browser.go(out.as_uri())
        assert "GPUs, 4 for decode." in browser.value("document.body.textContent")
        assert browser.value("document.querySelectorAll('svg').length") == 5
        assert browser.value("document.querySelectorAll('svg path').length") == 8
        assert browser.value("document.querySelectorAll('svg circle').length") == 120
        width = "(path) => path.getAttribute('stroke-width')"
        widths = f"[...document.querySelectorAll('path')].map({width})"
        assert browser.value(widths) == ["5", "1.5"] * 4, "resident lies under the other line"
        assert browser.value(
            "[...document.querySelectorAll('path')].every((path) => path.getTotalLength() > 0)"
        )
        assert browser.errors() == []


@pytest.mark.parametrize("output", [-1, 2_000_000_000, 1 << 40])
def test_a_line_that_asks_for_too_many_tokens_is_named(
    tmp_path: Path, output: int, capsys: pytest.CaptureFixture[str]
):
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 900, "output_length": %d, "hash_ids": []}\n'
    trace.write_text(line % 20 + line % output)
    assert main(["sim", "--trace", str(trace)]) == 2
    assert f"line 2: 900 prompt and {output:,} output tokens" in capsys.readouterr().err


def test_host_memory_limits_no_resident_worker(planner: Planner):
    """A host that holds one request of 128K: resident runs as many as without a limit."""
    mix = Mix(rate=50.0, count=12, prompt_tokens=130_000, output_tokens=64)
    serving = Serving(objective=OBJECTIVE, tier=(16, 1), cached_share=1.0)
    poor = replace(planner, ask=Ask(context=131_072, host_bytes=32 * (8 << 30)))
    free, held = (serve(each, draw(mix, seed=0), serving) for each in (planner, poor))
    assert held.offload.batch_peak == 1 < free.offload.batch_peak
    assert held.resident == free.resident


@pytest.mark.parametrize("mtp", few([2], all_of=[1, 2]))
def test_the_pace_is_kept_by_nine_in_ten(planner: Planner, mtp: int):
    """A queue that never empties: as many as the time of a batch of 16 allows."""
    here = replace(planner, ask=Ask(context=33_280, queries_each=mtp))
    objective = Objective(ttft_s=10.0, tpot_s=here.point(16, 33_280).token_us / 1e6)
    mix = Mix(rate=8.0, count=60, prompt_tokens=32_768, output_tokens=256)
    serving = Serving(objective=objective, tier=(32, 4), cached_share=0.9, is_paced=True)
    served = serve(here, draw(mix, seed=0), serving).offload
    assert "time per token" in served.waited_s
    assert served.tpot_s is not None
    assert 0.9 * objective.tpot_s < served.tpot_s.p90 <= objective.tpot_s


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "give --trace FILE, or --rate"),
        (["--rate", "0"], "rate of 0.0"),
        (["--rate", "1", "--prefill", "4"], "pipelines x GPUs"),
        (["--rate", "1", "--prefill", "1x99"], "1 to 61 GPUs"),
        (["--rate", "1", "--requests", "0"], "at least one"),
        (["--rate", "1", "--waiting", "-1"], "waiting -1"),
        (["--rate", "1", "--seed", "-1"], "a seed of -1"),
        (["--rate", "1", "--out", "2000000000"], "an output of 2,000,000,000 tokens"),
        (["--rate", "1", "--out", "1000000", "--requests", "200"], "200,000,000 tokens"),
        (["--rate", "1", "--gpu", "abacus"], "abacus"),
        (
            ["--rate", "1", "--attention-tp", "3"],
            "--gpus 32 do not divide evenly by --attention-tp 3",
        ),
        (["--rate", "1", "--expert-tp", "32"], "EP 1 x TP 32) were not measured; measured were"),
        (
            ["--rate", "1", "--attention-tp", "32"],
            "attention of 4 heads over fp8 rows was not measured",
        ),
        (["--rate", "1", "--ctx", "4m"], "a prompt of 4,194,304 tokens"),
        (["--trace", "nowhere.csv"], "the trace nowhere.csv cannot be read: No such file"),
    ],
)
def test_wrong_asks_get_a_sentence(asked: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["sim", *asked]) == 2
    assert says in capsys.readouterr().err
