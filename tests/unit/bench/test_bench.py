"""The benchmark skeleton, driven by tiny benchmarks of its own."""

from __future__ import annotations

import graphlib
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
from ess.bench.harness import frame, report
from ess.bench.harness.measure import machine, timing
from ess.bench.harness.measure.timing import Arm, measure
from ess.bench.harness.output import table
from ess.bench.harness.report import Row, compare
from ess.console import Command
from ess.errors import BadInput, BadState, Unavailable

Run = Callable[..., tuple[int, str, str]]


def tiny(*, count: int = 100, smoke: bool = False) -> list[Row]:
    """Tiny.

    Parameters
    ----------
    count
        How many.
    """
    print("progress that must not reach the document")
    count = 10 if smoke else count
    row = compare(name="tiny", unit="us", ours=[2.0], baseline=("slow", [5.0]), target=2.0)
    return [msgspec.structs.replace(row, config={"count": count})]


def plain(*, smoke: bool) -> list[Row]:
    return [Row(name="plain", value=1.0, unit="B", samples=[1.0])]


def broken(*, smoke: bool) -> list[Row]:
    raise ZeroDivisionError("the benchmark fell over")


def misshapen(*, smoke: bool) -> list[Row]:
    return [Row(name="misshapen", value=float("nan"), unit="B")]


def stopped(*, smoke: bool) -> list[Row]:
    raise KeyboardInterrupt


def lacking(*, smoke: bool) -> list[Row]:
    raise Unavailable("llama is not here: pip install it")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    import sys
    import types

    home = types.ModuleType("tiny_benchmarks")
    for function in (tiny, plain, broken, misshapen, stopped, lacking):
        setattr(home, function.__name__, function)
    monkeypatch.setitem(sys.modules, "tiny_benchmarks", home)
    names = ("tiny", "plain", "broken", "misshapen", "stopped", "lacking")
    commands = [
        Command(name=name, home=f"tiny_benchmarks:{name}", summary=f"{name}.") for name in names
    ]
    suites = {"good": names[:2], "bad": names[2:4], "all": names[:4], "cut": names}
    suites["few"] = ("lacking", "plain")

    def run_it(*arguments: str) -> tuple[int, str, str]:
        given = cli.spelled_out(arguments)
        code = console.run(cli.make_app(commands, suites, given), given)
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
    assert "misshapen: a value, ratio, target or sample is not finite" in err
    assert "failed: broken, misshapen" in err


def test_a_package_that_is_missing_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking.py").write_text("import no_such_package.inside")
    monkeypatch.syspath_prepend(tmp_path)
    lacking = Command(name="lacking", home="lacking:rows", summary="")
    monkeypatch.setattr(cli, "BENCHMARKS", (lacking,))
    assert cli.main(["lacking", "--smoke"]) == 1
    *_, said = capsys.readouterr().err.splitlines()
    need = "lacking needs no_such_package, which is not installed"
    assert said == f"ess-bench: {need}: pip install 'ess[serve]'"


def test_a_shell_completes_the_flags_of_every_benchmark(run: Run) -> None:
    code, out, _ = run("completion", "bash")
    assert code == 0
    assert '"--count"' in out


def test_ctrl_c_keeps_the_rows_of_what_ran_before(run: Run) -> None:
    code, out, err = run("cut", "--json")
    assert code == 130
    assert [row["name"] for row in json.loads(out)["rows"]] == ["tiny", "plain"]
    assert "interrupted in stopped" in err
    code, out, err = run("cut", "--json", "--only", "stopped")
    assert (code, out) == (130, "")
    assert err.endswith("ess-bench: interrupted\n")


def test_what_lacks_a_package_is_left_out_of_a_suite_and_refused_alone(run: Run) -> None:
    code, out, err = run("few", "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)["rows"]] == ["plain"]
    assert "lacking is left out: llama is not here: pip install it" in err
    assert "Traceback" not in err
    assert run("lacking", "--json")[::2] == (
        1,
        "lacking ...\ness-bench: llama is not here: pip install it\n",
    )


@pytest.mark.parametrize("form", ["table", "md", "jsonl"])
def test_rows_are_shown_as_soon_as_their_benchmark_has_ended(
    form: report.Format, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = report.Shown(form, *about())
    suite = frame.Suite(frame.Frame(format=form), shown, 2)
    suite.run("tiny", tiny)
    first = capsys.readouterr()
    assert ("tiny" in first.out, "plain" in first.out) == (True, False)
    assert re.search(r"\[1/2\] tiny: \d+\.\d s, \d+\.\d s of processor time", first.err)
    suite.run("plain", plain)
    shown.end()
    second = capsys.readouterr().out
    assert ("tiny" in second, "plain" in second) == (False, True)
    assert "benchmark" not in second, "the head is printed once"


def test_the_slow_ones_of_a_suite_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    suite = frame.Suite(frame.Frame(), report.Shown(None, *about()), 3)
    suite.spent.update(a=frame.Spent(1.0, 0.5), b=frame.Spent(60.0, 9.0), c=frame.Spent(30.0, 9.0))
    suite.told()
    assert capsys.readouterr().err == (
        "slowest: b 60.0 s, 9.0 s of processor time; c 30.0 s, 9.0 s of processor time\n"
    )


def about() -> tuple[machine.Build, machine.Machine]:
    return machine.build(), machine.machine()


def test_whole_numbers_are_not_rounded(run: Run) -> None:
    code, out, err = run("tiny", "--count", "2.5")
    assert (code, out) == (2, "")
    assert "--count 2.5 is not a whole number" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("goood",), 'Did you mean "good"'),
        (("good", "--only", "broken"), "choose from tiny, plain"),
        (("good", "--out", "no/such/folder/x.json"), "no/such/folder does not exist"),
        (("good", "--smok"), "did you mean --smoke?"),
        (("tiny", "--cuont", "3"), "did you mean --count?"),
        (("good", "--format", "json"), 'Choose from: "table", "md", "csv", "jsonl"'),
        (("tiny", "--json", "no/such/folder/x.json"), "no/such/folder does not exist"),
    ],
)
def test_usage_errors_run_nothing(run: Run, arguments: tuple[str, ...], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in " ".join(err.replace("│", " ").split())
    assert "progress" not in err


def test_files_hold_the_same_document(run: Run, tmp_path: Path) -> None:
    kept, other = tmp_path / "x.json", tmp_path / "y.json"
    code, out, _ = run("good", "--json", "--out", str(kept))
    assert code == 0
    assert kept.read_text() == out
    code, out, _ = run("good", "--json", str(other))
    assert (code, out) == (0, "")
    assert json.loads(other.read_text())["rows"] == json.loads(kept.read_text())["rows"]
    assert set(tmp_path.iterdir()) == {kept, other}


def test_a_benchmark_has_its_own_options_and_fails_in_its_own_words(run: Run) -> None:
    code, out, _ = run("tiny", "--count", "7", "--json")
    assert code == 0
    assert json.loads(out)["rows"][0]["config"] == {"count": 7}
    with pytest.raises(ZeroDivisionError):
        run("broken")
    code, out, err = run("misshapen")
    assert (code, out) == (2, "")
    assert "misshapen: a value, ratio, target or sample is not finite" in err


def test_the_table_shows_the_baseline_beside(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = run("good")
    assert code == 0
    assert "\x1b" not in out
    line = next(line for line in out.splitlines() if "tiny" in line)
    assert line.split() == ["tiny", "2", "us", "slow:", "5", "x2.5", "x2", "met"]
    assert "\n    count=100\n" in out
    assert re.search(r"cores, .* load \d+\.\d\d at start", out)


@pytest.mark.parametrize("name", [benchmark.name for benchmark in cli.BENCHMARKS])
def test_every_benchmark_takes_what_all_take(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert {"--smoke", "--json", "--format", "--out"} <= set(out.split())
    assert "[default: ]" not in out


def test_suites_are_made_of_benchmarks() -> None:
    names = [benchmark.name for benchmark in cli.BENCHMARKS]
    assert len(set(names)) == len(names)
    assert set(cli.SUITES["all"]) == set(names)
    assert set(cli.SUITES["kernels"]) | set(cli.SUITES["engine"]) <= set(names)
    assert not set(cli.SUITES) & set(names)


def test_the_readme_names_every_benchmark_or_its_suite() -> None:
    """The headline stands above the table; documents are checked for commands in blocks only."""
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    measure = readme.partition("## Measure")[2].partition("\n## ")[0]
    shown = set(re.findall(r"^\| `([a-z-]+)", measure, re.MULTILINE)) - {"ess-bench"}
    members = {name for suite in shown & set(cli.SUITES) for name in cli.SUITES[suite]}
    assert (shown - set(cli.SUITES)) | members | {cli.HEADLINE} == set(cli.SUITES["all"])


def test_options_without_a_command_are_those_of_the_headline(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--ctx", "128k", "--jsn"]) == 2
    assert "did you mean --json?" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert "vs-transformers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("good --json", "good --json=-"),
        ("good --json --smoke", "good --json=- --smoke"),
        ("good --json - --smoke", "good --json=- --smoke"),
        ("good --json x.json", "good --json x.json"),
        ("", ""),
    ],
)
def test_json_alone_means_stdout(given: str, spelled: str) -> None:
    assert cli.spelled_out(given.split()) == spelled.split()


def test_the_trace_benchmark_runs_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "--smoke", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    sizes = {row["baseline"]: row["ratio"] for row in rows if row["unit"] == "B"}
    assert sizes["int32"] > 3.5
    assert sizes["zlib of int32"] > 1.2


@pytest.mark.parametrize("name", ["trace", "paper"])
def test_a_table_of_a_command_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert max(map(len, lines)) <= 120


def test_no_circle_of_imports_among_the_modules() -> None:
    """Also none through an import inside a function."""
    grimp = pytest.importorskip("grimp", reason="import-linter brings it")
    graph = grimp.build_graph("ess", exclude_type_checking_imports=True, cache_dir=None)
    names = {name for name in graph.modules if name.startswith("ess.bench")}
    imports = {name: graph.find_modules_directly_imported_by(name) & names for name in names}
    graphlib.TopologicalSorter(imports).prepare()


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
    assert (row.ratio, row.met, row.samples) == (ratio, True, [float(each) for each in ours])
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
    ],
)
def test_a_wrong_row_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=f"x: .*{says}"):
        Row(**({"name": "x", "value": 1.0, "unit": "us"} | changes))


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
def test_a_measurement_of_nothing_is_refused(arm_count: int, repeats: int, warmups: int) -> None:
    with pytest.raises(BadInput, match="nothing to time"):
        measure([Arm(name="a", run=int)] * arm_count, repeats=repeats, warmups=warmups)


def test_the_hash_sees_every_byte() -> None:
    wide = np.arange(24, dtype=np.int32).reshape(4, 6)
    hashes = [
        timing.result_hash(each)
        for each in (wide, wide[:, ::2], wide + 1, b"x", "x", 1, 1.5, None, [wide], [1, 2], [2, 1])
    ]
    assert len(set(hashes)) == len(hashes)
    assert timing.result_hash(wide[:, ::2]) == timing.result_hash(wide[:, ::2].copy())
    with pytest.raises(BadInput, match="type set has no hash"):
        timing.result_hash({1})


LONG = {
    "name": "inter-layer prefetch, share of fetched rows that were missed, generated",
    "value": 123_456_789.0,
    "unit": "events/s per core",
    "baseline": "memmove per row, in a loop of Python or of C, whichever is faster",
    "baseline_value": 0.001234,
    "ratio": 98_765_432.1,
    "target": 0.984375,
    "met": False,
    "config": {f"key_{number}": "word " * 9 for number in range(9)},
    "samples": [],
}


def test_no_line_of_a_table_is_longer_than_120_columns() -> None:
    shown = table.lines(LONG)
    text = " ".join(" ".join(shown).split())
    for part in ("inter-layer prefetch,", "123,456,789", "per core", "0.001234", "x0.984 MISSED"):
        assert part in text, part
    config = table.config_lines(LONG)
    assert len(config) == 2
    assert config[1].endswith("...")
    assert max(map(len, [*table.heading(), *shown, *config])) <= 120


STORED = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.mark.parametrize("path", sorted(STORED.glob("*.json")), ids=lambda path: path.name)
def test_stored_rows_fit_and_show_their_verdict(path: Path) -> None:
    for row in json.loads(path.read_text())["rows"]:
        lines = table.lines(row)
        assert max(map(len, [*lines, *table.config_lines(row)])) <= 120
        name, value, baseline, ratio, target = table.cells(row)
        for cell in (value, ratio, target):
            assert cell in lines[0], "what is compared stands in the first line"
        words = set(" ".join(lines).split())
        assert set(f"{name} {baseline}".split()) <= words


def test_the_machine_line_is_complete() -> None:
    here, made = machine.machine(), machine.build()
    assert here.cores >= 1
    assert here.ram_bytes > 1 << 28
    assert here.cpu in here.line()
    assert made.version in made.line()
    assert made.commit is None or re.fullmatch(r"[0-9a-f]{12}\+?", made.commit)
