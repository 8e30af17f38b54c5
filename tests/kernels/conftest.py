from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

try:
    import msgspec
except ImportError:
    msgspec = None

# On a machine with a GPU and nothing of ours, the ops are tested and the models are not.
collect_ignore = ["test_stage.py"] if msgspec is None else []


@pytest.fixture(scope="session")
def folder(emulated: Path) -> Path:
    """Where the libraries of the emulated device are built; a process has one watch."""
    return emulated


@pytest.fixture(scope="module", params=[False, True], ids=["phases", "together"])
def kernels(request: pytest.FixtureRequest, folder: Path) -> Any:
    """Residency, emulated: in phases, and by one block."""
    from tests.support.emulated_residency import Emulated

    return Emulated(folder, is_together=request.param)


@pytest.fixture
def operations(kernels: Any) -> Any:
    """The same, when nothing has landed."""
    kernels.reset()
    return kernels
