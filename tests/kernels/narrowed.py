"""Tests in a process that is held to a narrower set of instructions than this machine has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ess.kernels.cpu import native

ISAS = ("portable", "avx2", "avx512")


def pass_with(isa: str, *files: str, only: str = "") -> str:
    """All tests of these files that are not slow, or `only` some; returns what pytest printed."""
    if ISAS.index(isa) > ISAS.index(native.isa()):
        pytest.skip(f"this machine has no {isa}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [*command, "-m", "not slow", "-k", only],
        env={**os.environ, "ESS_ISA": isa},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
