"""The door of a device against the door of the host, beside a device that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


@pytest.mark.parametrize("module", ["played", "clocked", "moving"])
def test_the_doors_agree(module: str, emulated: Path) -> None:
    beside.run_tests(f"tests/door_device/{module}.py", built=emulated)
