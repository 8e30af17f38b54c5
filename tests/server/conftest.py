"""Two servers that tests of several dialects ask; a test file whose server says something else has
its own fixture of that name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ess.models.chat.styles import DeepSeekStyle
from tests.server.harness import PacedEngine, Served, saying
from tests.server.tool_calls import REPLY


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with Served(PacedEngine(saying(" It is noon."), cached_count=2)) as made:
        yield made


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    with Served(PacedEngine(saying(REPLY)), style=DeepSeekStyle(), is_marked=True) as made:
        yield made
