"""The engine beside a device that is not there: modules of this folder, some in a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


BENCHMARKS = pytest.param("benchmarks", marks=pytest.mark.long)


MODULES = (
    "budgets choices broken memory ranges slices timing",
    "plans",
    "libraries loading steps",
    BENCHMARKS,
    pytest.param("grid", marks=pytest.mark.long),
)


@pytest.mark.parametrize("modules", MODULES)
def test_an_engine_on_the_pretended_device(modules: str, built: Path) -> None:
    files = (f"tests/device/{name}.py" for name in modules.split())
    beside.run_tests(*files, "-m", "not long", built=built)


@pytest.mark.long
@pytest.mark.parametrize("modules", ["broken", "plans", "steps"])
def test_more_of_it_on_the_pretended_device(modules: str, built: Path) -> None:
    beside.run_tests(f"tests/device/{modules}.py", "-m", "long", built=built)
