"""A checkpoint of the tiny model, for servers and their engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.states.world import V4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return V4.stored(tmp_path_factory.mktemp("v4") / "the-model")
