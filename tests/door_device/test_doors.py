"""The door of a device against the door of the host, beside a device that is not there."""

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


def test_the_doors_agree(tmp_path: Path) -> None:
    played = ROOT / "tests" / "door_device" / "played.py"
    given = [sys.executable, "-m", "pytest", "-p", "tests.support.pretended", str(played)]
    env = {**os.environ, "ESS_EMULATED": str(tmp_path)}
    done = subprocess.run(given, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
