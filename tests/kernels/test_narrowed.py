"""Tests in a process that is held to a narrower set of instructions than this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ess.kernels.cpu import native
from tests.kernels.sets import ISAS
from tests.support.built import needs_native
from tests.support.few import few
from tests.support.own_python import python

HERE = Path(__file__).parent
OPS, WHOLE = ("attend", "index", "reference"), ("stage", "codes")
FILES = [str(HERE / f"test_{name}.py") for name in (*OPS, *WHOLE, "rows")]
ONLY = (
    f"({' or '.join(f'test_{name}' for name in OPS)}) and (cpu or native)"
    f" or {' or '.join(f'test_{name}' for name in WHOLE)} or test_rows and matrix"
)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("every", few([3], all_of=[3, 1]))
def test_every_set_of_instructions_agrees(isa: str, every: int) -> None:
    """One in `every` of each function's cases. `avx512` named is without its bf16 products, so the
    four sets are all seen. What the widest does without tiles is seen in test_tiles where this
    machine has some."""
    if ISAS.index(isa) > ISAS.index(native.isa()):
        pytest.skip(f"this machine has no {isa}")
    plugins = ("-p", "no:cacheprovider", "-p", "tests.support.sampled")
    command = ("-m", "pytest", *plugins, *FILES, "-m", "not slow", "-k", ONLY)
    done = python(*command, timeout_s=600, ESS_ISA=isa, SAMPLED_EVERY=f"{every}")
    assert done.returncode == 0, done.stdout[-4000:]
