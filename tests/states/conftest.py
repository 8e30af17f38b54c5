"""Checkpoints of the tiny models, for servers and their engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.states.world import World


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[World], Path]:
    made = tmp_path_factory.mktemp("states")
    return functools.cache(lambda world: world.stored(made / world.family))
