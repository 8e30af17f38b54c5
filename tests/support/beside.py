"""Python that runs in a process of its own, beside a device that is not there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.built import needs_native
from tests.support.emulate import needs_compiler
from tests.support.forked import finished

ROOT = Path(__file__).resolve().parents[2]
NEEDS = (
    needs_compiler,
    needs_native,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is missing")
        for name in ("cuda", "triton")
    ),
)
"""Marks of a test that runs such a process."""


def run(*command: object, built: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m command`; the emulated device's libraries are kept in the folder `built`."""
    done = _done("-m", *command, built=built, path=path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done


def run_script(text: str, *, built: Path) -> subprocess.CompletedProcess[str]:
    """However it ends."""
    return _done("-c", text, built=built)


def _done(*given: object, built: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ESS_EMULATED": str(built), **({"PYTHONPATH": path} if path else {})}
    return finished("interpreted", *given, env=env)


def run_tests(*tests: str, built: Path) -> str:
    """What pytest printed, which met no failure and has run some."""
    printed = run("pytest", "-p", "tests.support.pretended", *tests, built=built).stdout
    assert " passed" in printed, printed
    return printed
