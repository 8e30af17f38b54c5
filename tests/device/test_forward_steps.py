"""Values beside the pretended device: modules of this folder with long tests, each in a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]
MODULES = ("doors", "drafts", "gate", "handoffs", "whole")


@pytest.mark.parametrize("module", MODULES)
def test_values_on_the_pretended_device(module: str, built: Path) -> None:
    beside.run_tests(f"tests/device/{module}.py", "-m", "not long", built=built)


@pytest.mark.long
@pytest.mark.parametrize("module", MODULES)
def test_more_values_on_the_pretended_device(module: str, built: Path) -> None:
    beside.run_tests(f"tests/device/{module}.py", "-m", "long", built=built)
