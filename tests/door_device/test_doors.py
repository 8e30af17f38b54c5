"""The door of a device against the door of the host, beside a device that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


@pytest.mark.parametrize("modules", ["played", "clocked moving landing"])
def test_the_doors_agree(modules: str, emulated: Path) -> None:
    names = (f"tests/door_device/{name}.py" for name in modules.split())
    beside.run_tests(*names, built=emulated)
