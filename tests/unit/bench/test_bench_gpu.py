"""What the benchmark of a device keeps when a part of it fails or hangs."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ess.bench.gpu import resolve, rows, suite
from ess.bench.gpu.rig import GATE, Row, row
from ess.bench.gpu.rows import RESULTS, ROW_BYTES, measured_before
from ess.pool import cuda_programs
from tests.device.measured import expectations


def test_what_was_measured_before_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, seen = tmp_path / "rows.json", []

    def fails(*, smoke: bool) -> Iterator[Row]:
        for turn in range(2):
            seen.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
            yield row(f"turn {turn}", "us", [1.0, 3.0])
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(suite, "load", lambda name, places: fails)
    monkeypatch.setattr(suite, "heading", lambda: {"schema": suite.SCHEMA})
    assert not suite.measure_one("rows", smoke=True, brief=False, out=out)
    assert seen == [0, 1]
    assert [each["name"] for each in json.loads(out.read_text())["rows"]] == ["turn 0", "turn 1"]
    printed = capsys.readouterr()
    assert "the device is gone" in printed.err
    assert "turn 1" in printed.out


def test_benchmarks_that_compare_alone_see_libraries_that_are_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "carried_library.py").write_text("run = print\n")
    monkeypatch.setattr(suite, "COMPARED", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ImportError):
        suite.load("layer", {"layer": "carried_library:run"})
    assert suite.load("others", {"others": "carried_library:run"}) is print


def test_rows_of_a_call_that_was_cut_off_are_not_taken_for_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, earlier = tmp_path / "rows.json", tmp_path / "rows.others.json"
    earlier.write_text('{"rows": [{"name": "of an earlier call"}]}')
    monkeypatch.setattr(suite, "finishes", lambda command, limit_s: False)
    assert not suite.measure_all(["others"], smoke=True, out=out)
    assert not out.exists()
    assert not earlier.exists()


def test_a_hang_ends_with_its_limit_and_with_all_it_has_started() -> None:
    hangs = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    began = time.monotonic()
    assert not suite.finishes([sys.executable, "-c", hangs], limit_s=1)
    assert time.monotonic() - began < 30
    assert not suite.finishes([sys.executable, "-c", "raise SystemExit(3)"], limit_s=60)
    assert suite.finishes([sys.executable, "-c", "pass"], limit_s=60)


def test_every_benchmark_has_a_limit_and_all_end_in_eight_minutes() -> None:
    assert set(suite.LIMIT_S) == set(suite.BENCHMARKS) > set(suite.KERNELS)
    assert suite.COMPILE_S + sum(suite.LIMIT_S.values()) <= 480


def test_all_programs_of_kernels_and_benchmarks_are_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(resolve, "Device", lambda: SimpleNamespace(arch="sm_90a"))
    monkeypatch.setattr(resolve, "cubin", lambda each, arch: made.append((each, arch)))
    resolve.resolve_kernels()
    rivals = [cuda_programs.rival_form(ROW_BYTES, unit).program for unit in (16, 8)]
    assert {each for each, _ in made} == {*cuda_programs.programs(), GATE, *rivals}
    assert {arch for _, arch in made} == {"sm_90a"}


def test_named_parts_run_in_their_order_and_their_rows_are_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = tmp_path / "rows.json", []

    def finishes(command: list[str], *, limit_s: float) -> bool:
        if "--launch" in command:
            ran.append((command[-1], limit_s))
            return False
        name, part = command[command.index("--only") + 1], Path(command[command.index("--out") + 1])
        ran.append((name, limit_s))
        part.write_text(json.dumps({"schema": suite.SCHEMA, "rows": [row(name, "us", [1.0])]}))
        return name != "rows"

    monkeypatch.setattr(suite, "finishes", finishes)
    monkeypatch.setattr(suite.driver, "why_missing", lambda: None)
    assert suite.main(["--only", "slice", "rows", "--out", str(out)]) == 1
    compiled, *measured = ran
    assert compiled == ("slice", suite.COMPILE_S)
    assert measured == [(name, suite.LIMIT_S[name]) for name in ("slice", "rows")]
    assert [each["name"] for each in json.loads(out.read_text())["rows"]] == ["slice", "rows"]
    assert [each.name for each in tmp_path.iterdir()] == ["rows.json"]


def test_what_other_machines_gave_is_shown_as_theirs() -> None:
    """No prediction stands where a device has answered."""
    shown = list(measured_before())
    assert {each["config"]["kind"] for each in shown} == {"before"}
    best = {(each["config"]["device"], each["name"]): each for each in shown}
    assert len(best) == len(shown)
    document = json.loads((RESULTS / "gpu-h100.json").read_text())
    for name in ("gather 512 rows, flat", "gather 65536 rows, copy engine"):
        values = [each["value"] for each in document["rows"] if each["name"] == name]
        values = values[:-1]  # the last was predicted in that run
        assert best[document["machine"]["device"], name]["value"] == max(values)
    assert best["NVIDIA H200", "scatter 65536 rows within 1 GiB, flat"]["config"]["blocks"] == 4


def test_a_pool_of_rows_keeps_to_the_memory_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "memory_free", lambda: 36 << 30)
    assert rows.pool_bytes(24 << 30) == 24 << 30
    assert rows.pool_bytes(25 << 30) == (36 << 30) // 8


def test_rows_of_other_machines_are_expected_of_the_next() -> None:
    """But `plan, ..., one block`, a way of planning that is gone."""
    known, gone = list(expectations().values()), re.compile(r"plan, batch \d+, one block")
    for path in RESULTS.glob("gpu-*.json"):
        names = {each["name"] for each in json.loads(path.read_text())["rows"]}
        assert names, path
        for name in names:
            assert gone.match(name) or any(each.fullmatch(name) for each in known), name
    assert not any(each.fullmatch("gather of rows") for each in known)
