"""The first day on a GPU goes on behind what fails, hangs or is cut off, and keeps what it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import first_day
from tests.gpu.__main__ import UNFINISHED
from tests.gpu.first_day import PRINTED, REPORT, Part

ROWS = {"rows": [{"name": "a row", "met": False}]}
DOCTOR = '{\n"checks": [{"name": "device", "grade": "ok", "found": "a GPU", "hint": ""}]}'


def part(name: str, script: str, limit_s: float = 60.0, *, stays: bool = False) -> Part:
    return Part(name, (sys.executable, "-c", script), limit_s, stays)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
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
        "hangs": part("hangs", "import time; print('hangs', flush=True); time.sleep(60)", 1.0),
        "slice": part("slice", f"{rows}; raise SystemExit(3)"),
    }
    monkeypatch.setattr(first_day, "phases", lambda _: [[one] for one in made.values()])
    monkeypatch.setattr(first_day, "LEAST_S", 0.5)
    monkeypatch.setattr(first_day, "machine", lambda: {"devices": "one"})
    return made


def run(tmp_path: Path, *more: str) -> dict[str, object]:
    out = tmp_path / "out"
    assert first_day.main(["--kept", str(tmp_path / "kept"), "--out", str(out), *more]) == 1
    assert {one.name for one in out.iterdir()} == {REPORT, PRINTED}
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
    commands = [one.command for one in (*first, *shared)]
    assert [one.name for one in (*first, *shared)] == ["native", "tests", "compile", "doctor"]
    assert (first_day.ROOT / commands[0][3]).is_file()
    assert "--behind" not in commands[1]
    limits = [max(one.limit_s for one in phase) for phase in (shared, *alone[:4])]
    assert [phase[0].name for phase in alone[:4]] == ["resolve", "slice", "layer", "step"]
    assert sum(limits) < 570
    (tmp_path / first_day.EARLIER).touch()
    _, (tests, *_), *_ = first_day.phases(tmp_path)
    assert tests.command[-2:] == ("--behind", str(tmp_path / first_day.EARLIER))
