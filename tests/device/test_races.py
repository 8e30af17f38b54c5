"""The watch for races over whole steps beside the pretended device, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


def test_races_beside_the_pretended_device(built: Path) -> None:
    beside.run_tests("tests/device/races.py", "-m", "not long", built=built)


@pytest.mark.long
@pytest.mark.parametrize("named", ["scenario", "not scenario"])
def test_more_races_beside_the_pretended_device(named: str, built: Path) -> None:
    beside.run_tests("tests/device/races.py", "-m", "long", "-k", named, built=built)


def test_what_the_host_does_to_page_locked_memory(built: Path) -> None:
    beside.run_tests("tests/device/page_locked.py", built=built)
