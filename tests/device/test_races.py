"""The watch for races over whole steps beside the pretended device, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


FILES = ("tests/device/races.py", "tests/device/page_locked.py")


def test_races_beside_the_pretended_device(built: Path) -> None:
    """Among them those of what the host does to page-locked memory."""
    beside.run_tests(*FILES, "-m", "not long", built=built)


@pytest.mark.long
@pytest.mark.parametrize("named", ["scenario", "not scenario"])
def test_more_races_beside_the_pretended_device(named: str, built: Path) -> None:
    beside.run_tests(*FILES, "-m", "long", "-k", named, built=built)
