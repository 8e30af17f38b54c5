"""Tests in a process that is held to a narrower set of instructions than this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ess.kernels.cpu import native
from tests.kernels.sets import ISAS

HERE = Path(__file__).parent
OPS, WHOLE = ("attend", "index", "reference"), ("stage", "codes")
FILES = [str(HERE / f"test_{name}.py") for name in (*OPS, *WHOLE, "rows")]
ONLY = (
    f"({' or '.join(f'test_{name}' for name in OPS)}) and (cpu or native)"
    f" or {' or '.join(f'test_{name}' for name in WHOLE)} or test_rows and matrix"
)


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason=native.why_missing())
@pytest.mark.parametrize("isa", ISAS)
def test_every_set_of_instructions_agrees(isa: str) -> None:
    """`avx512` named is without its bf16 products, so the four sets are all seen."""
    if ISAS.index(isa) > ISAS.index(native.isa()):
        pytest.skip(f"this machine has no {isa}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *FILES]
    done = subprocess.run(
        [*command, "-m", "not slow", "-k", ONLY],
        env={**os.environ, "ESS_ISA": isa},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
