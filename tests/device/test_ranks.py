"""Ranks that divide the experts of a model on devices: as processes, beside the pretended device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.device.test_served import FOLDER
from tests.ranks.test_processes import add, expected, ranks
from tests.support import beside
from tests.support.process import ROOT

pytestmark = [pytest.mark.slow, *beside.NEEDS]
ON_DEVICE = {"device": "cuda", "backend": "cuda", "modes": "none"}


@pytest.fixture(autouse=True)
def told(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment in which engines have the pretended device."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(FOLDER), str(ROOT))))
    monkeypatch.setenv("PRETENDED_DRIVER", str(built))


def test_ranks_give_the_tokens_of_one_process(tmp_path):
    with ranks(tmp_path, 2, **ON_DEVICE, mtp=1, graphs=0) as made:
        for engine in made:
            engine.ready()
        first, last = made
        first.say(add(0, 40))
        first.say(add(1, 130))
        first.until(lambda _: bool(first.tokens(1)))
        last.say(add(2, 90))
        first.ended(0, 1)
        last.ended(2)
        assert first.tokens(0) == expected(40)
        assert first.tokens(1) == expected(130)
        assert last.tokens(2) == expected(90)
