"""What the tests of this folder share."""

from __future__ import annotations

import pytest

from ess.prefill.trial import pipe
from tests.support.forked import forking


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of timed pipelines are forked from a process that has made their imports."""
    monkeypatch.setattr(pipe, "subprocess", forking("engine"))
