"""What the tests of this folder share."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from ess.prefill.trial import pipe
from tests.support.forked import started


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of timed pipelines are forked from a process that has made their imports."""

    def forked(command: list[str], **given: object) -> subprocess.Popen[bytes]:
        return started("engine", command[1:], **given)

    monkeypatch.setattr(
        pipe, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": forked})
    )
