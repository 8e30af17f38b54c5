"""A sample of some modules' mutants in every full run; the whole campaign by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = (
    ("ess.kernels.merge", "ess.overlap.dba", "ess.overlap.tbo", "ess.pool.budget"),
    ("ess.pool.lru.specification", "ess.pool.pages"),
)
"""Those of a line share a process, and with it what their tests import."""


@pytest.mark.slow
@pytest.mark.parametrize("modules", SAMPLED, ids=" ".join)
def test_most_mutants_die(modules: tuple[str, ...]) -> None:
    given = [word for name in modules for word in ("--module", name)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.model.mutants", *given),
            *("--sample", "5", "--seed", "3", "--floor", "0.9"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{name}: " in done.stdout for name in modules), done.stdout
