"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the emulated device's libraries are kept, compiled once."""
    return tmp_path_factory.mktemp("emulated")
