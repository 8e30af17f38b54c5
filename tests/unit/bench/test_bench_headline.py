"""The headline: both halves, every form, the timeline, and refusals before any work."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ess.bench import cli
from ess.bench.engine.cpu_tables import CpuTables
from ess.bench.harness.measure.slow_lane import Job
from ess.bench.harness.measure.spans import step_spans
from ess.bench.harness.output import plots
from ess.bench.harness.output.chrome_trace import chrome_events
from ess.bench.harness.report import Row, compare
from ess.bench.headline import headline
from ess.bench.headline.plan import HeadlineRun, Outcome
from ess.bench.headline.predicted import predict
from ess.flashtrans.lanes import DoneEvent
from ess.overlap.timeline import Span as Stage
from ess.server.commands.cli import main as ess_main
from ess.sim.operators.tables import Curve, Surface
from ess.sim.timeline import COMPUTE, FETCH, STORE, Span
from tests.support.few import few

SMALL = ("--ctx", "320", "--mtp", "2", "--repetitions", "2")


def job(byte_count: int, *waits: tuple[int, int]) -> Job:
    return Job(
        lane_event=DoneEvent(2_000, 5_000),
        byte_count=byte_count,
        submitted_ns=1_500,
        due_ns=0,
        starts_ns=0,
        waits_ns=list(waits),
    )


def test_the_compute_lane_has_no_holes_and_gaps_are_named_by_their_place() -> None:
    stages = [
        Stage(0, 0, "index", 1_000, 2_000),
        Stage(0, 0, "wait", 2_000, 4_500),
        Stage(0, 0, "attend_all", 5_000, 7_000),
        Stage(1, 0, "index", 9_000, 9_500),
        Stage(2, 0, "index", 9_600, 9_900),
    ]
    jobs = [job(656, (2_000, 4_500)), job(1312, (20_000, 21_000))]
    spans = step_spans(stages, jobs, layers=2, begin_ns=0, end_ns=10_000)
    compute = [span for span in spans if span.lane == COMPUTE]
    assert [span.name for span in compute] == [
        *("begin", "index", "wait", "attention, between stages", "attend_all", "experts"),
        *("index", "head", "index", "end"),
    ]
    assert compute[0].start_us == 0
    for before, after in itertools.pairwise(compute):
        assert after.start_us == before.end_us
    assert compute[-1].end_us == 10
    assert spans[-2:] == [Span(FETCH, "fetch 656 B", 2, 5), Span(STORE, "store 1,312 B", 2, 5)]


def test_a_timeline_names_its_processes_and_lanes() -> None:
    parts = [("one", [Span("a", "x", 0, 5), Span("b", "y", 1, 2)]), ("two", [Span("b", "z", 3, 4)])]
    events = chrome_events(parts)
    spans = [event for event in events if event["ph"] == "X"]
    assert [(each["pid"], each["tid"], each["name"]) for each in spans] == [
        *((0, 0, "x"), (0, 1, "y"), (1, 0, "z"))
    ]
    assert (spans[1]["ts"], spans[1]["dur"]) == (1, 1)
    named = {
        (each["pid"], each["tid"]): each["args"]["name"] for each in events if each["ph"] == "M"
    }
    assert named[1, 0] == "b"


def test_tables_never_predict_less_than_nothing() -> None:
    falling = Surface((1.0, 2.0), (Curve((1.0, 2.0), (9.0, 9.0)), Curve((1.0, 2.0), (1.0, 1.0))))
    flat = Surface((1.0, 2.0), (Curve((1.0, 2.0), (5.0, 7.0)), Curve((1.0, 2.0), (5.0, 7.0))))
    tables = CpuTables(stages={"odd": falling, "even": flat})
    assert tables.step_us(queries=2, context=100) == 7


def test_the_predicted_half_has_its_baseline_and_pareto() -> None:
    outcome = Outcome()
    predict(outcome, HeadlineRun(contexts=(131_072,)), 131_072, 2)
    best, whole, *pareto, unlimited = outcome.rows
    assert best.ratio is not None
    assert whole.ratio is not None
    assert unlimited.ratio is not None
    assert 1 < whole.ratio < best.ratio < unlimited.ratio
    assert best.config["host_gib"] * 8 <= 2048 < unlimited.config["host_gib"] * 8
    for row in (best, whole, unlimited):
        least, most = map(float, row.config["ratio_ends"].split(".."))
        assert least < row.ratio < most
    assert "accepted tokens: assumed" in best.config["not_measured"]
    rates = [row.config["per_user"] for row in pareto]
    assert all(rate >= asked for rate, asked in zip(rates, (15, 20, 30), strict=True))
    [curves] = outcome.curves
    assert curves.points[-1].batch < curves.floor_batch < curves.index_wall
    assert max(each.tokens_per_s for each in curves.points) == pytest.approx(best.value)
    [(_, spans)] = outcome.timelines
    assert {span.lane for span in spans} >= {COMPUTE, FETCH}


ASKED = ({}, {"gpus": 8}, {"gpu": "b200"}, {"model": "glm-5.2"})


@pytest.mark.parametrize("given", few(ASKED[1::2], all_of=ASKED))
def test_the_predicted_half_says_what_ess_plan_says(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the two sides share the model in different ways."""
    outcome = Outcome()
    predict(outcome, HeadlineRun(contexts=(65_536,), mtps=(3,), **given), 65_536, 3)
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert ess_main(["plan", "--ctx", "64k", "--mtp", "3", "--json", *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    best, whole = outcome.rows[:2]
    assert (best.value, best.baseline_value, best.ratio) == pytest.approx(
        (said["chosen"]["tokens_per_s"], said["resident"]["tokens_per_s"], said["gain"])
    )
    assert whole.ratio == pytest.approx(said["all_gpus"]["gain"])


def test_a_resident_side_that_is_missing_is_named() -> None:
    outcome = Outcome()
    predict(outcome, HeadlineRun(contexts=(1 << 20,), gpus=8), 1 << 20, 2)
    best, whole, *pareto = outcome.rows
    assert (best.baseline, best.config["resident"]) == (None, "not one request fits")
    assert whole.ratio is None
    assert {row.config.get("resident") for row in pareto if row.value} <= {"not one request fits"}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*SMALL, *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    return tmp_path


@pytest.mark.slow
def test_both_halves_in_one_document(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = home / "t.json"
    document = json.loads(run(capsys, "--json", "--trace", str(trace)))
    by_half: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        by_half.setdefault(row["config"].get("half", ""), []).append(row)
    assert set(by_half) == {"", "measured", "check", "predicted"}
    whole, offload = by_half["measured"]
    assert offload["baseline"] == "no offload"
    assert offload["baseline_value"] == pytest.approx(whole["value"])
    assert {"misses_p50", "misses_p95", "exposed_ms", "per_user", "slots_each"} <= set(
        offload["config"]
    )
    assert len(offload["samples"]) == 2
    for row in (whole, offload):
        assert row["config"]["per_user"] == round(row["value"] / row["config"]["batch"], 2)
    assert by_half["check"][0]["baseline"] == "measured"
    events = json.loads(trace.read_text())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert [name.partition(":")[0] for name in names] == ["measured", "predicted"]
    assert (home / "kept" / "ess" / "prefix").is_dir()


def test_forms_for_people_and_for_spreadsheets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured row with its spread, a predicted one, and a sentence."""
    outcome = Outcome()
    config = {"half": "measured", "ctx": 320, "per_user": 9.5}
    outcome.rows.append(
        Row(name="ours", value=10, unit="tokens/s", config=config, samples=[8, 10, 12])
    )
    outcome.rows.append(Row(name="context", value=1, unit="s", config={"how": "prefilled whole"}))
    config = {"half": "predicted", "batch": 3}
    outcome.rows.append(
        compare(name="gpu", unit="t/s", ours=[8], baseline=("resident", [16]), config=config)
    )
    monkeypatch.setattr(headline, "run", lambda *given, **named: outcome.rows)
    markdown = run(capsys, "--format", "md")
    assert "| benchmark | value | baseline | ratio | target | config |" in markdown
    assert "| context | 1 s |  |  |  | how=prefilled whole |" in markdown
    assert "| gpu | 8 t/s | resident: 16 | x2 |  | half=predicted batch=3 |" in markdown
    lines = list(csv.DictReader(io.StringIO(run(capsys, "--format", "csv"))))
    assert [(each["name"], each["std"], each["ctx"]) for each in lines] == [
        *(("ours", "2.0", "320"), ("context", "", ""), ("gpu", "", ""))
    ]
    rows = [json.loads(line) for line in run(capsys, "--format", "jsonl").splitlines()]
    assert [row["name"] for row in rows] == ["ours", "context", "gpu"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ctx", "128k", "--model", "gpt-2"), "no operator tables for 'gpt-2'"),
        (("--ctx", "128k", "--gpu", "a100"), "'a100'"),
        (("--ctx", "128k", "--model", "deepseek-r1"), "attends to every row"),
        (("--ctx", "128k", "--node-ram", "much"), "--node-ram"),
        (("--ctx", "128k", "--gpus", "0"), ": gpus 0: it must be 1 or more"),
        (("--ctx", "128k", "--mtp", "9"), "at most 8 tokens a step"),
        (("--ctx", "4k", "--mode", "fast"), "--mode fast: choose from layerwise"),
        (("--ctx", "64m"), "take a smaller --batch or --ctx"),
        (("--ctx", "4k", "--repetitions", "0"), "between 1 and 1000"),
        (("--ctx", "4k", "--repetitions", "1000000000"), "between 1 and 1000"),
        (("--ctx", "4k", "--mtp", "1.5"), "--mtp 1.5 is not a whole number"),
        (("--ctx", "4k", "--trace", "."), "it is a folder"),
        (("--ctx", "4k", "--out", "."), "it is a folder"),
        (("--ctx", "4k", "--trace", "no/such/t.json"), "no/such does not exist"),
        (("--ctx", "4k", "--batch", "none"), "is not a size"),
    ],
)
def test_refusals_come_before_the_work(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(list(arguments)) == 2
    seen = capsys.readouterr()
    assert says in seen.err
    assert seen.out == ""


def test_curves_and_timelines_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots need the extra ess[plot]")
    outcome = Outcome()
    for context in (32_768, 131_072):
        predict(outcome, HeadlineRun(contexts=(context,)), context, 2)
    headline.draw(outcome, trace=None, plot=tmp_path)
    names = {path.stem for path in tmp_path.iterdir()}
    first = {"throughput", "pareto", "timeline-predicted"}
    assert names == first | {f"{name}-2" for name in first}
    assert plots.DPI > 72
