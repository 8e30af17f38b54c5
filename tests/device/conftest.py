"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built(emulated: Path) -> Path:
    """Where the emulated device's libraries are kept, compiled once."""
    return emulated


@pytest.fixture
def alone() -> Iterator[None]:
    """For a module that runs beside the pretended device."""
    from tests.device import engines

    with engines.alone():
        yield
