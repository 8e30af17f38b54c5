"""The first day on a GPU goes on behind what fails, hangs or is cut off, and keeps what it has."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from setuptools import Distribution

from ess.server.commands.start.settings import read_environment
from tests.gpu import first_day, marked
from tests.gpu.__main__ import UNFINISHED
from tests.gpu.first_day import PRINTED, REPORT, Part
from tests.gpu.marked import MARK
from tests.support.kin import wait_for_end

ROWS = {"rows": [{"name": "a row", "met": False}]}
DOCTOR = '{\n"checks": [{"name": "device", "grade": "ok", "found": "a GPU", "hint": ""}]}'


def part(name: str, script: str, limit_s: float = 60.0, *, stays: bool = False) -> Part:
    return Part(name, (sys.executable, "-c", script), limit_s, stays)


class Begun(subprocess.Popen[bytes]):
    """Its limit begins with its first word: on a busy machine a program takes long to start."""

    def __init__(self, words: object, **given: Any) -> None:
        self._said = given["stdout"].fileno()
        super().__init__(words, **given)  # type: ignore[call-overload]

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None and not os.fstat(self._said).st_size:
            time.sleep(0.01)
        return super().wait(timeout)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a moment are no limits on the start of a program."""
    monkeypatch.setattr(
        marked, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Begun})
    )
    monkeypatch.setattr(first_day, "LEAST_S", 0.01)


@pytest.fixture
def parts(brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """Those of a day, each in a phase of its own."""
    kept = tmp_path / "kept"
    rows = f"open({str(kept / 'slice.json')!r}, 'w').write({json.dumps(ROWS)!r})"
    made = {
        "native": part("native", "print('built')", stays=True),
        "tests": part(
            "tests",
            f"print('FAILED a {UNFINISHED}'); print('1 passed, 1 failed'); print('a last word')",
        ),
        "doctor": part("doctor", f"print('first a line'); print({DOCTOR!r}); print('a warning')"),
        "hangs": part("hangs", "import time; print('hangs', flush=True); time.sleep(60)", 0.1),
        "slice": part("slice", f"{rows}; raise SystemExit(3)"),
    }
    monkeypatch.setattr(first_day, "phases", lambda _: [[each] for each in made.values()])
    monkeypatch.setattr(first_day, "machine", lambda: {"devices": "one"})
    return made


def run(tmp_path: Path, *more: str) -> dict[str, object]:
    out = tmp_path / "out"
    assert first_day.main(["--kept", str(tmp_path / "kept"), "--out", str(out), *more]) == 1
    assert {each.name for each in out.iterdir()} == {REPORT, PRINTED}
    return json.loads((out / REPORT).read_text())


def test_each_end_is_kept_and_the_next_part_begins(
    parts: dict[str, Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(tmp_path)
    assert {name: told["end"] for name, told in report["parts"].items()} == {
        **dict.fromkeys(("native", "tests", "doctor"), "exit 0"),
        "hangs": "stopped",
        "slice": "exit 3",
    }
    assert report["counts"] == "1 passed, 1 failed"
    assert report["rows"] == [ROWS["rows"][0] | {"part": "slice"}]
    printed = (tmp_path / "out" / PRINTED).read_text()
    assert "==== hangs\nhangs" in printed
    shown = capsys.readouterr().out
    assert "rows: 1, of which 1 miss their target" in shown
    assert "doctor: ok: device: a GPU" in shown


def test_an_end_is_written_while_parts_beside_it_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "kept" / REPORT
    read = f"json.loads(pathlib.Path({str(report)!r}).read_text())"
    slow = f"import json, pathlib\nwhile not {read}['parts']['quick']['ended']: pass"
    beside = [part("slow", slow, 20.0), part("quick", "pass")]
    monkeypatch.setattr(first_day, "phases", lambda _: [beside])
    monkeypatch.setattr(first_day, "machine", lambda: {"devices": "one"})
    assert first_day.main(["--kept", str(tmp_path / "kept")]) == 0
    ends = json.loads(report.read_text())["parts"]
    assert {name: told["end"] for name, told in ends.items()} == dict.fromkeys(ends, "exit 0")


def test_what_a_part_prints_is_written_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is taken away, with all that runs on it, has given what was known by then."""
    printed = tmp_path / "out" / PRINTED
    read = f"pathlib.Path({str(printed)!r}).read_text()"
    alone = f"import pathlib\nprint('begun', flush=True)\nwhile 'begun' not in {read}: pass"
    monkeypatch.setattr(first_day, "WRITTEN_S", 0.1)
    monkeypatch.setattr(first_day, "phases", lambda _: [[part("alone", alone, 20.0)]])
    monkeypatch.setattr(first_day, "machine", lambda: {"devices": "one"})
    out = "--out", str(tmp_path / "out")
    assert first_day.main(["--kept", str(tmp_path / "kept"), *out]) == 0
    earlier = tmp_path / "kept" / REPORT
    report = json.loads(earlier.read_text())
    report["parts"]["alone"] = first_day.RUNNING
    earlier.write_text(json.dumps(report))
    assert first_day.main(["--kept", str(tmp_path / "kept"), *out]) == 0, "it was not begun again"


def test_a_second_run_does_what_the_first_has_not(parts: dict[str, Part], tmp_path: Path) -> None:
    run(tmp_path)
    for name in ("native", "doctor", "slice"):
        parts[name] = part(name, "raise SystemExit(9)", stays=parts[name].stays)
    parts["tests"] = part("tests", "print('2 passed, 0 failed')")
    parts["hangs"] = part("hangs", "print('no more')")
    report = run(tmp_path)
    ends = {name: told["end"] for name, told in report["parts"].items()}
    assert ends == {**dict.fromkeys(parts, "exit 0"), "slice": "exit 3"}
    assert (report["counts"], report["failed"]) == ("2 passed, 0 failed", [])
    assert "1 passed, 1 failed" in (tmp_path / "out" / PRINTED).read_text(), "what ran is lost"


def test_on_another_machine_is_made_again_what_stayed_on_the_first(
    parts: dict[str, Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    for name in ("native", "doctor"):
        parts[name] = part(name, "raise SystemExit(9)", stays=parts[name].stays)
    monkeypatch.setattr(first_day, "boot", lambda: "another")
    report = run(tmp_path)
    assert report["parts"]["native"]["end"] == "exit 9"
    assert report["parts"]["doctor"]["end"] == "exit 0"


def test_without_time_nothing_begins(parts: dict[str, Part], tmp_path: Path) -> None:
    report = run(tmp_path, "--limit-s", "0")
    assert {told["end"] for told in report["parts"].values()} == {"not begun"}


def test_its_parts_are_what_this_tree_has(tmp_path: Path) -> None:
    """A call of ten minutes has room for what is worth most."""
    first, shared, *alone = first_day.phases(tmp_path)
    commands = [each.command for each in (*first, *shared)]
    assert [each.name for each in (*first, *shared)] == ["native", "tests", "compile", "doctor"]
    assert (first_day.ROOT / commands[0][3]).is_file()
    assert "--behind" not in commands[1]
    limits = [max(part.limit_s for part in phase) for phase in (shared, *alone[:4])]
    assert [phase[0].name for phase in alone[:4]] == ["resolve", "slice", "layer", "step"]
    assert sum(limits) < 570
    (tmp_path / first_day.EARLIER).touch()
    _, (tests, *_), *_ = first_day.phases(tmp_path)
    assert tests.command[-2:] == ("--behind", str(tmp_path / first_day.EARLIER))


LEAVES = (
    "import pathlib, subprocess, sys, time\n"
    "words = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
    "other = subprocess.Popen(words, start_new_session=True)\n"
    "pathlib.Path({left!r}).write_text(str(other.pid))\n"
    "print('12:00:01 passed     0.1 s some::test_a')\n"
    "print('12:00:02 failed     0.2 s some::test_b', flush=True)\n"
    "{then}"
)


@pytest.fixture
def alone(brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the one part of a day."""

    def of(script: str, limit_s: float = 60.0) -> None:
        monkeypatch.setattr(first_day, "phases", lambda _: [[part("tests", script, limit_s)]])

    monkeypatch.setattr(first_day, "machine", lambda: {"devices": "a GPU, 1 MiB"})
    return of


def test_a_day_that_is_cut_off_leaves_no_process_and_goes_on(
    alone: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "left"
    alone(LEAVES.format(left=str(left), then="time.sleep(600)"))

    def interrupted(self: first_day.Day, playing: object) -> None:
        while "test_b" not in self.said("tests"):
            pass
        raise KeyboardInterrupt

    given = "--kept", str(tmp_path / "kept"), "--out", str(tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(first_day.Day, "watch", interrupted)
        assert first_day.main(given) == first_day.CUT_OFF
    wait_for_end(int(left.read_text()))
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["parts"]["tests"]["end"] == "cut off"
    assert report["failed"] == ["FAILED some::test_b"]
    assert report["counts"] == "1 passed, 0 skipped, 1 failed so far"
    alone("print('12:00:03 passed     0.1 s some::test_c'); raise SystemExit(1)")
    assert first_day.main(given) == 1, "it has ended without a summary"
    alone("print('2 passed, 0 skipped, 0 failed')")
    assert first_day.main(given) == 0
    assert "test_b" in (tmp_path / "out" / PRINTED).read_text()


@pytest.mark.parametrize("then", ["time.sleep(600)", "raise SystemExit(0)"], ids=["stops", "ends"])
def test_what_a_part_leaves_in_another_session_ends_with_it(
    alone: Callable[..., None], tmp_path: Path, then: str
) -> None:
    left = tmp_path / "left"
    alone(LEAVES.format(left=str(left), then=then), limit_s=0.1)
    first_day.main(["--kept", str(tmp_path / "kept")])
    wait_for_end(int(left.read_text()))


@pytest.mark.parametrize(
    "line", ["nothing is tested: the CUDA driver sees no device", "slice: not measured, no torch"]
)
def test_a_part_that_found_nothing_to_do_runs_again(
    alone: Callable[..., None], tmp_path: Path, line: str
) -> None:
    given = "--kept", str(tmp_path / "kept")
    alone(f"print({line!r})")
    assert first_day.main(given) == 1
    told = json.loads((tmp_path / "kept" / REPORT).read_text())["parts"]["tests"]
    assert (told["ended"], told["end"]) == (False, f"exit 0, {line}")
    alone("print('2 passed, 0 skipped, 0 failed')")
    assert first_day.main(given) == 0


def test_a_server_of_a_day_takes_the_mark_for_no_setting() -> None:
    assert read_environment({MARK: "1.tests."}) == {}


def test_a_report_of_another_device_or_a_damaged_one_is_set_aside(
    alone: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    alone("print('1 passed, 0 skipped, 0 failed')")
    assert first_day.main(["--kept", str(kept)]) == 0
    alone("print('2 passed, 0 skipped, 0 failed')")
    assert first_day.main(["--kept", str(kept)]) == 0
    counts = json.loads((kept / REPORT).read_text())["counts"]
    assert counts == "1 passed, 0 skipped, 0 failed", "the same device: it goes on"
    monkeypatch.setattr(first_day, "machine", lambda: {"devices": "none"})
    assert first_day.main(["--kept", str(kept)]) == 0
    report = json.loads((kept / REPORT).read_text())
    assert report["counts"] == counts, "a device that is not seen for now is no other device"
    assert report["machine"] == {"devices": "a GPU, 1 MiB"}
    monkeypatch.setattr(first_day, "machine", lambda: {"devices": "another GPU, 1 MiB"})
    assert first_day.main(["--kept", str(kept)]) == 0
    assert json.loads((kept / REPORT).read_text())["counts"].startswith("2 passed")
    assert json.loads((kept / f"before-{REPORT}").read_text())["counts"].startswith("1 passed")
    (kept / REPORT).write_text('{"parts": {"te')
    alone("print('3 passed, 0 skipped, 0 failed')")
    assert first_day.main(["--kept", str(kept)]) == 0
    assert json.loads((kept / REPORT).read_text())["counts"].startswith("3 passed")


def test_a_build_that_was_ended_keeps_what_is_compiled(tmp_path: Path) -> None:
    build = runpy.run_path(str(first_day.ROOT / "csrc" / "build.py"))
    made, source, runs = tmp_path / "one.o", tmp_path / "one.cpp", []

    def compile_one(made: str, source: str, *options: str) -> None:
        runs.append(options)
        Path(made).write_text("half")
        if options == ("ends",):
            raise KeyboardInterrupt
        Path(made).write_text(source)

    def compiled(*options: str, flags: str = "", force: bool = False) -> int:
        before, command = len(runs), build["SideBySide"](Distribution())
        programs = {"executables": {"compiler_so_cxx": None}, "compiler_so_cxx": ["c++", flags]}
        command.compiler = SimpleNamespace(compile=None, _compile=compile_one, **programs)
        command.extensions, command.force = [], force
        command.build_extensions()
        command.compiler._compile(str(made), str(source), *options)
        return len(runs) - before

    source.write_text("int one;")
    with pytest.raises(KeyboardInterrupt):
        compiled("ends")
    assert [compiled("-O1"), compiled("-O1"), compiled("-O2")] == [1, 0, 1]
    with pytest.raises(KeyboardInterrupt):
        compiled("ends")
    assert [compiled("-O2"), compiled("-O2")] == [1, 0]
    assert [compiled("-O2", flags="-g"), compiled("-O2", flags="-g")] == [1, 0]
    assert [compiled("-O2", flags="-g", force=True), compiled("-O2", flags="-g")] == [1, 0]
    source.write_text("int two;")
    assert [compiled("-O2"), compiled("-O2")] == [1, 0]
    made.unlink()
    assert compiled("-O2") == 1
