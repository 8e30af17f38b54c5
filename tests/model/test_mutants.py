"""A sample of some modules' mutants in every full run; the whole campaign by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLED = (
    "ess.kernels.merge",
    "ess.overlap.dba",
    "ess.overlap.tbo",
    "ess.pool.budget",
    "ess.pool.lru.specification",
    "ess.pool.pages",
)


@pytest.mark.slow
@pytest.mark.parametrize("module", SAMPLED)
def test_most_mutants_die(module):
    command = [sys.executable, "-m", "tests.model.mutants", "--module", module]
    done = subprocess.run(
        [*command, "--sample", "10", "--seed", "3", "--floor", "0.9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
