"""Values beside the pretended device: modules of this folder with long tests, some in a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]
MODULES = ("disks drafts gate verifying whole", "doors", "handoffs", "pipelines")
MORE = ("disks verifying", "doors", "drafts", "gate", "whole", "handoffs", "pipelines")


def run(modules: str, marks: str, built: Path) -> None:
    files = (f"tests/device/{name}.py" for name in modules.split())
    beside.run_tests(*files, "-m", marks, built=built)


@pytest.mark.parametrize("modules", MODULES)
def test_values_on_the_pretended_device(modules: str, built: Path) -> None:
    run(modules, "not long", built)


@pytest.mark.long
@pytest.mark.parametrize("modules", MORE)
def test_more_values_on_the_pretended_device(modules: str, built: Path) -> None:
    run(modules, "long", built)
