"""The door of a device against the door of the host, beside a device that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


def test_the_doors_agree(emulated: Path) -> None:
    beside.run_tests("tests/door_device/played.py", built=emulated)
