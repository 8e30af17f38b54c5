"""The benchmark skeleton, driven by tiny benchmarks of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ess import console
from ess.bench import cli
from ess.bench.cli import Benchmark
from ess.bench.harness import machine, report, timing
from ess.bench.harness.report import Row, as_row, compare
from ess.bench.harness.timing import Arm, measure
from ess.errors import BadInput, BadState

Run = Callable[..., tuple[int, str, str]]


def tiny(*, smoke: bool) -> list[Row]:
    print("progress that must not reach the document")
    count = 10 if smoke else 100
    row = compare(name="tiny", unit="us", ours=[2.0], baseline=("slow", [5.0]), target=2.0)
    return [msgspec.structs.replace(row, config={"count": count})]


def plain(*, smoke: bool) -> list[dict[str, Any]]:
    return [{"name": "plain", "value": 1, "unit": "B", "samples": [1.0]}]


def broken(*, smoke: bool) -> list[Row]:
    raise ZeroDivisionError("the benchmark fell over")


def misshapen(*, smoke: bool) -> list[dict[str, Any]]:
    return [{"name": "misshapen", "value": "fast", "unit": "B"}]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    import sys
    import types

    home = types.ModuleType("tiny_benchmarks")
    for function in (tiny, plain, broken, misshapen):
        setattr(home, function.__name__, function)
    monkeypatch.setitem(sys.modules, "tiny_benchmarks", home)
    table = [
        Benchmark(suite=suite, name=name, home=f"tiny_benchmarks:{name}")
        for suite, name in (
            ("good", "tiny"),
            ("good", "plain"),
            ("bad", "broken"),
            ("bad", "misshapen"),
        )
    ]
    app = cli.make_app(table, {"good": "Good ones.", "bad": "Bad ones.", "all": "All."})

    def run_it(*arguments: str) -> tuple[int, str, str]:
        code = console.run(app, arguments)
        return code, *capsys.readouterr()

    return run_it


def test_the_document_has_the_common_form(run: Run) -> None:
    code, out, err = run("good", "--json")
    assert code == 0
    document = json.loads(out)
    assert list(document) == ["schema", "build", "machine", "rows"]
    assert document["schema"] == "ess.bench/1"
    for row in document["rows"]:
        assert list(row) == [
            *("name", "value", "unit", "baseline", "baseline_value"),
            *("ratio", "target", "met", "config", "samples"),
        ]
    first, second = document["rows"]
    assert (first["ratio"], first["met"], first["config"]) == (2.5, True, {"count": 100})
    assert (second["value"], second["baseline"]) == (1.0, None)
    assert "progress that must not reach the document" in err


def test_smoke_and_only_reach_the_benchmark(run: Run) -> None:
    code, out, _ = run("all", "--json", "--smoke", "--only", "tiny")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["config"] for row in rows] == [{"count": 10}]


def test_a_failure_keeps_the_other_rows_and_says_so(run: Run) -> None:
    code, out, err = run("all", "--json")
    assert code == 1
    assert [row["name"] for row in json.loads(out)["rows"]] == ["tiny", "plain"]
    assert "the benchmark fell over" in err
    assert "benchmark row 'misshapen'" in err
    assert "failed: broken, misshapen" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("goood",), 'Did you mean "good"'),
        (("good", "--only", "broken"), "choose from tiny, plain"),
        (("good", "--out", "no/such/folder/x.json"), "no/such/folder does not exist"),
        (("good", "--smok"), "--smoke"),
    ],
)
def test_usage_errors_run_nothing(run: Run, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in " ".join(err.replace("│", " ").split())
    assert "progress" not in err


def test_out_holds_the_same_document(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("good", "--json", "--out", str(tmp_path / "x.json"))
    assert code == 0
    assert (tmp_path / "x.json").read_text() == out
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_the_table_shows_the_baseline_beside(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = run("good")
    assert code == 0
    assert "\x1b" not in out
    line = next(line for line in out.splitlines() if "tiny" in line)
    assert line.split() == ["tiny", "count=100", "2", "us", "slow", "5", "us", "x2.50", "x2", "met"]
    assert re.search(r"cores, .* load \d+\.\d\d at start", out)


@pytest.mark.parametrize("name", [one.home for one in cli.BENCHMARKS])
def test_every_benchmark_in_the_table_exists(name: str) -> None:
    module = pytest.importorskip(name.partition(":")[0], reason="this benchmark is not merged yet")
    assert callable(getattr(module, name.partition(":")[2]))


def test_every_suite_has_a_summary_and_a_member() -> None:
    assert {one.suite for one in cli.BENCHMARKS} | {"all"} == set(cli.SUITES)


def test_the_trace_benchmark_runs_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--smoke", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    sizes = {row["baseline"]: row["ratio"] for row in rows if row["unit"] == "B"}
    assert sizes["int32"] > 3.5
    assert sizes["zlib of int32"] > 1.2


@pytest.mark.parametrize(
    ("better", "ours", "rival", "ratio"),
    [
        ("lower", [4, 1, 2], [8, 8, 8], 4.0),
        ("higher", [4, 1, 2], [8, 8, 8], 0.25),
        ("lower", [1, 3], [4], 2.0),
    ],
)
def test_a_ratio_above_one_is_a_win(
    better: report.Better, ours: list[float], rival: list[float], ratio: float
) -> None:
    row = compare(
        name="x", unit="us", ours=ours, baseline=("old", rival), better=better, target=ratio
    )
    assert (row.ratio, row.met, row.samples) == (ratio, True, [float(one) for one in ours])
    worse = compare(
        name="x", unit="us", ours=ours, baseline=("old", rival), better=better, target=ratio * 1.01
    )
    assert worse.met is False


@pytest.mark.parametrize("samples", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_samples_that_mean_nothing_are_refused(samples: list[float]) -> None:
    with pytest.raises(BadInput, match="samples of ours"):
        compare(name="x", unit="us", ours=samples, baseline=("old", [1.0]))
    with pytest.raises(BadInput, match="samples of old"):
        compare(name="x", unit="us", ours=[1.0], baseline=("old", samples))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value": float("nan")}, "not finite"),
        ({"baseline": "old"}, "a name and a value"),
        ({"target": 2.0}, "needs met"),
        ({"speed": 1}, "speed"),
        ({"unit": 3}, "str"),
        ({"config": {"rows": object()}}, "not a plain value"),
    ],
)
def test_a_wrong_row_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        as_row({"name": "x", "value": 1.0, "unit": "us"} | changes)


def test_numpy_numbers_make_a_row() -> None:
    drawn = {"name": "x", "value": np.float32(1.5), "unit": "us", "config": {"rows": np.int64(7)}}
    row = as_row(drawn | {"samples": [np.float64(2.5)], "target": 1, "met": np.bool_(True)})
    written = msgspec.json.decode(msgspec.json.encode(row))
    assert (written["value"], written["config"], written["samples"]) == (1.5, {"rows": 7}, [2.5])
    assert written["met"] is True


class FakeTime:
    """A clock that the arms move: what they take is known exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def arm(self, name: str, *, takes: float, returns: Any = 7) -> Arm:
        def work() -> Any:
            self.calls.append(name)
            self.now += takes
            return returns

        def prepare() -> None:
            self.calls.append(f"prepare {name}")
            self.now += 100.0

        return Arm(name=name, run=work, prepare=prepare)


def test_arms_take_turns_and_preparation_is_free() -> None:
    fake = FakeTime()
    arms = [fake.arm("a", takes=1.0), fake.arm("b", takes=3.0)]
    a, b = measure(arms, repeats=3, warmups=1, same_result=True, clock=lambda: fake.now)
    assert (a.seconds, b.seconds) == ([1.0] * 3, [3.0] * 3)
    assert [call for call in fake.calls if " " not in call] == list("abbaabba")
    assert fake.calls[::2] == [f"prepare {name}" for name in fake.calls[1::2]]
    assert a.median_s == 1.0
    assert b.each(2, scale=1000.0) == [1500.0] * 3
    assert b.per(6.0) == [2.0] * 3


def test_arms_that_disagree_are_refused() -> None:
    fake = FakeTime()
    arms = [fake.arm("a", takes=1.0, returns=b"x"), fake.arm("b", takes=1.0, returns=b"y")]
    assert len(measure(arms, repeats=1, clock=lambda: fake.now)) == 2
    with pytest.raises(BadState, match="different results"):
        measure(arms, repeats=1, same_result=True, clock=lambda: fake.now)


@pytest.mark.parametrize(("arm_count", "repeats", "warmups"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_nothing_to_time(arm_count: int, repeats: int, warmups: int) -> None:
    with pytest.raises(BadInput, match="nothing to time"):
        measure([Arm(name="a", run=int)] * arm_count, repeats=repeats, warmups=warmups)


def test_the_hash_sees_every_byte() -> None:
    wide = np.arange(24, dtype=np.int32).reshape(4, 6)
    hashes = [
        timing.result_hash(one)
        for one in (wide, wide[:, ::2], wide + 1, b"x", "x", 1, 1.5, None, [wide], [1, 2], [2, 1])
    ]
    assert len(set(hashes)) == len(hashes)
    assert timing.result_hash(wide[:, ::2]) == timing.result_hash(wide[:, ::2].copy())
    with pytest.raises(BadInput, match="type set has no hash"):
        timing.result_hash({1})


def test_the_machine_line_is_complete() -> None:
    here, made = machine.machine(), machine.build()
    assert here.cores >= 1
    assert here.ram_bytes > 1 << 28
    assert here.cpu in here.line()
    assert made.version in made.line()
    assert made.commit is None or re.fullmatch(r"[0-9a-f]{12}\+?", made.commit)


def test_a_missing_folder_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--out"):
        report.run(lambda: pytest.fail("measured"), json=True, out=tmp_path / "no" / "x.json")
    kept = tmp_path / "x.json"
    report.run(lambda: [report.Row(name="x", value=1.0, unit="us")], json=True, out=kept)
    assert json.loads(kept.read_text())["rows"][0]["name"] == "x"
