"""A stage whose order breaks off, by any error, has the pools that it had before."""

from __future__ import annotations

import pytest

from ess.prefill.orders import Profile
from tests.prefill.pipes import stage_of, text

LAYERS = (0, 4)


def broken(*args: object, **named: object) -> None:
    raise MemoryError("no memory for a state")


def test_a_profile_that_breaks_off_leaves_its_pages(monkeypatch: pytest.MonkeyPatch):
    stage = stage_of(LAYERS)
    before = stage.free()
    with monkeypatch.context() as patch:
        patch.setattr(stage.ranks, "queue_part", broken)
        with pytest.raises(MemoryError):
            stage.obey(Profile(0, 100))
    assert stage.free() == before
    stage.obey(Profile(1, 100))
    assert [ran.batch for ran in stage.ran()] == [1]
    stage.check()


def test_an_open_that_breaks_off_leaves_its_pages(monkeypatch: pytest.MonkeyPatch):
    stage = stage_of(LAYERS)
    before, prompt = stage.free(), text(100)
    with monkeypatch.context() as patch:
        patch.setattr(stage.port.sender, "offer_pages", broken)
        with pytest.raises(MemoryError):
            stage.open(0, prompt, uid=7, salt=b"")
    assert stage.free() == before
    assert stage.open(0, prompt, uid=7, salt=b"") == 0
    stage.check()
