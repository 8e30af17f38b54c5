from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

try:
    import msgspec
except ImportError:
    msgspec = None

# On a machine with a GPU and nothing of ours, the ops are tested and the models are not.
collect_ignore = ["test_stage.py"] if msgspec is None else []


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Small ops on busy cores wait longer for a second thread than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
