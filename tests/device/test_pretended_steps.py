"""The engine beside a device that is not there: modules of this folder, each in its own process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ess.kernels.cpu import native
from tests.support.emulate import needs_compiler

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.skipif(not native.available(), reason=native.why_missing()),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is missing")
        for name in ("cuda", "triton")
    ),
]


@pytest.mark.parametrize("module", ["choices", "doors", "loading", "steps"])
def test_an_engine_on_the_pretended_device(module: str, tmp_path: Path) -> None:
    given = "pytest", "-p", "tests.support.pretended", f"tests/device/{module}.py"
    env = {**os.environ, "ESS_EMULATED": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", *given], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout, done.stdout
