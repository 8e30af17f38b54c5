from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
