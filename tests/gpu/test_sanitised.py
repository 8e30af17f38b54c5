"""Every kernel under compute-sanitizer, a tool at a time, at small sizes (sanitised.py)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PLAYED = Path(__file__).with_name("sanitised.py")
REFUSALS = ("Device not supported", "Unable to initialize", "driver is not supported")
FOLLOW_BARRIERS = "racecheck", "synccheck"
LIMIT_S = 75


@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_every_kernel(tool):
    sanitised("--tool", tool, words=["kernels", "rings"])


@pytest.mark.parametrize("tool", FOLLOW_BARRIERS)
def test_kernels(tool):
    sanitised("--tool", tool, words=["kernels"])


@pytest.mark.parametrize("tool", FOLLOW_BARRIERS)
def test_rings(tool):
    """A ring makes a barrier for each of its four places and 64 threads."""
    sanitised("--tool", tool, "--num-cuda-barriers", "256", words=["rings"])


def sanitised(*options, words):
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [checker, *options, "--error-exitcode", "9", sys.executable, str(PLAYED), *words]
    status, printed = output_of(command, limit_s=LIMIT_S)
    for refusal in REFUSALS:
        if refusal in printed:
            pytest.skip(f"compute-sanitizer refuses this machine: {refusal}")
    assert status == 0, findings(printed)
    assert "all scenarios played" in printed


def findings(printed):
    """What the tool says, from its first word on, beside which scenario; then how all ended. What a
    kernel has done wrong comes long before the calls that fail behind it."""
    lines = printed.splitlines()
    said = [line for line in lines if line.startswith("=========") or line.endswith(" ...")]
    return "\n".join([*said[:80], "[...]", *lines[-25:]])


def output_of(command, *, limit_s):
    """The tool starts a process of its own that holds the pipe: both end with the limit."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as child:
        try:
            printed, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            printed = child.communicate()[0] + f"\nkilled after {limit_s} s"
    return child.returncode, printed
