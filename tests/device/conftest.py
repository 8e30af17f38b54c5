"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built(emulated: Path) -> Path:
    """Where the emulated device's libraries are kept, compiled once."""
    return emulated
