"""The watch for races over whole steps beside the pretended device, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import beside

pytestmark = [pytest.mark.slow, *beside.NEEDS]


@pytest.mark.parametrize("marks", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_races_beside_the_pretended_device(marks: str, built: Path) -> None:
    beside.run_tests("tests/device/races.py", "-m", marks, built=built)


def test_what_the_host_does_to_page_locked_memory(built: Path) -> None:
    beside.run_tests("tests/device/page_locked.py", built=built)
