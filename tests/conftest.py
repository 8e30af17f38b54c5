"""What every folder of tests shares."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def emulated(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries of the emulated device are built, once for all workers of a run."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if hasattr(pytestconfig, "workerinput") else own) / "emulated"
    folder.mkdir(exist_ok=True)
    return folder


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
