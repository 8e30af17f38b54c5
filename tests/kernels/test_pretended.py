"""The targets of a device, every line of their Python, beside a device that is not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ess.bench.harness import table
from ess.kernels.cpu import native
from tests.support.emulate import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/gpu/test_device.py::test_a_lane_follows_torch",
    "tests/gpu/test_device.py::test_a_thousand_replays_of_one_graph[together]",
    "tests/gpu/test_experts.py::test_replays_follow_the_counts",
    "tests/kernels/test_grouped.py::test_every_token_meets_its_expert[cuda-token3-weight3]",
    "tests/kernels/test_triton_ops.py::test_positions_become_slots[cuda]",
    "tests/kernels/test_triton_ops.py::test_rows_are_copied_as_far_as_the_count[cuda]",
    "tests/kernels/test_attend.py::test_one_key_returns_its_value[cuda-656-dtype1]",
    "tests/kernels/test_rowcodec.py::test_golden_row[cuda]",
)

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.skipif(not native.available(), reason=native.why_missing()),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is missing")
        for name in ("cuda", "triton")
    ),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "ESS_EMULATED": str(tmp_path_factory.mktemp("emulated"))}


def run(*command: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    given = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def test_tests_of_a_device(emulated: dict[str, str]) -> None:
    printed = run("pytest", "-p", "tests.support.pretended", *TESTS, env=emulated).stdout
    assert f"{len(TESTS)} passed" in printed, printed


@pytest.mark.parametrize("name", ["rows", "resolve", "layer", "attend", "experts"])
def test_benchmarks_of_a_device(name: str, emulated: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    given = "ess.bench.gpu.suite", "--smoke", "--only", name, "--out", out
    printed = run("tests.support.pretended", *given, env=emulated).stdout.splitlines()
    rows = json.loads(out.read_text())["rows"]
    assert rows
    assert max(map(len, printed)) <= 120
    shown = [line for row in rows for line in (*table.lines(row), *table.config_lines(row))]
    assert printed == [*table.heading(), *shown]


def test_libraries_that_are_missing_are_named(emulated: dict[str, str], tmp_path: Path) -> None:
    """There is nothing to time beside our kernels, and the reason is said for each library."""
    given = "ess.bench.gpu.suite", "--smoke", "--only", "others", "--json"
    done = run("tests.support.pretended", *given, env=emulated)
    assert done.stdout == ""
    for said in ("attention: triton (", "indexer: triton (", "experts: triton ("):
        assert said in done.stderr


WRONG = {
    "torch.zeros(3, device='cuda') + torch.zeros(3)": "same device",
    "torch.zeros(3, device='cuda').numpy()": "to numpy",
    "copy_rows(torch.zeros(2, 8, dtype=torch.uint8), *there[1:])": "cpu tensor",
    "capture(lambda: there[0].tolist())": "not permitted",
    "capture(lambda: there[0].copy_(torch.zeros(2, 8)))": "not permitted",
    "capture(torch.cuda.synchronize)": "not permitted",
}
SCRIPT = """
from tests.support import pretended
import torch
from ess.kernels.cuda.triton.copy import copy_rows

def capture(work):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work()

there = [torch.zeros(2, 8, dtype=torch.uint8, device="cuda") for _ in range(5)]
for line, says in WRONG.items():
    try:
        eval(line)
    except (RuntimeError, TypeError, ValueError) as error:
        assert says in str(error), (line, error)
    else:
        raise AssertionError(f"{line} was not refused")
graph, one = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
with torch.cuda.graph(graph):
    two = one + 1
    two *= 2
one.fill_(4)
graph.replay()
assert two.cpu().tolist() == [10, 10, 10]
"""


def test_the_pretence_refuses_what_a_device_does(emulated: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(f"WRONG = {WRONG!r}\n{SCRIPT}")
    run(script.stem, env=emulated | {"PYTHONPATH": f"{ROOT}:{tmp_path}"})
