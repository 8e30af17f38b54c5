"""The engine beside a device that is not there: modules of this folder, each in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


BENCHMARKS = pytest.param("benchmarks", marks=pytest.mark.long)


MODULES = (
    "budgets",
    "choices",
    "disks",
    "doors",
    "loading",
    "memory",
    "ranges",
    "slices",
    "steps",
    "timing",
    BENCHMARKS,
    pytest.param("grid", marks=pytest.mark.long),
)


@pytest.mark.parametrize("module", MODULES)
def test_an_engine_on_the_pretended_device(module: str, built: Path) -> None:
    beside.run_tests(f"tests/device/{module}.py", built=built)
