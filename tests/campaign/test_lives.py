"""Lives that all go well, and mistakes that are planted and found."""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Callable

import msgspec
import pytest

from ess.engine.layers.selected import SelectedRows
from ess.engine.tokens import verification
from ess.errors import EssError
from ess.overlap.policy import Mode
from ess.pool import prefix
from tests.campaign.lives import divided
from tests.campaign.lives.plan import (
    FAMILIES,
    HAPPENINGS,
    OF_TEXT,
    PLAIN,
    ROW_FORMS,
    WISHES,
    Ask,
    Life,
    crowded,
    drawn,
)
from tests.campaign.lives.shrink import shrunk
from tests.campaign.lives.world import Wrong, live
from tests.support.few import few

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SEEDS = (1, 2, 3, 38, 43)
DIVIDED = (3, 6)
"""Four ranks with experts of their own; two stages of two ranks."""


@pytest.mark.parametrize("seed", few(SEEDS, all_of=range(250)))
def test_every_token_is_right_and_every_page_is_free(seed: int) -> None:
    assert live(drawn(seed)).seen["steps"]


@pytest.mark.parametrize("seed", DIVIDED)
def test_every_token_is_right_where_ranks_divide_the_model_or_its_experts(seed: int) -> None:
    assert divided.live(seed)["tokens"]


@pytest.mark.parametrize("seed", DIVIDED)
def test_rows_that_are_fetched_and_forgotten_are_missed_there(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelectedRows, "attend_fetched", lambda self, rows, resident: resident)
    with pytest.raises((AssertionError, EssError, ExceptionGroup)) as wrong:
        divided.live(seed)
    told = "".join(traceback.format_exception(wrong.value))
    assert "AssertionError: Ask(" in told or "attention differs by" in told


def test_everything_is_drawn() -> None:
    lives = [drawn(seed) for seed in range(200)]
    assert {life.family for life in lives} == {*FAMILIES}
    assert {life.form for life in lives} == {*ROW_FORMS}
    assert {ask.wish for life in lives for ask in life.asks} == {*WISHES, *OF_TEXT}
    assert {hit.what for life in lives for hit in life.hits} == {*HAPPENINGS}
    assert {life.drifts for life in lives} == {True, False}


def test_a_life_whose_settings_change_runs_every_mode() -> None:
    seen = live(msgspec.structs.replace(two(mtp=4), drifts=True)).seen
    assert all(seen[f"layers {mode.name}"] for mode in Mode), seen


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_that_are_right_are_all_taken(depth: int) -> None:
    """Of 12 tokens the first comes alone, the others four, four and three at a time."""
    life = two(mtp=4, depth=depth)
    seen = live(msgspec.structs.replace(life, right=1.0)).seen
    assert (seen["parts"], seen["tokens"]) == (8, 24)


def test_requests_that_come_together_run_together() -> None:
    life = two()
    assert not live(life).seen["steps of three or more"]
    life = crowded(msgspec.structs.replace(life, asks=life.asks * 2))
    assert live(life).seen["steps of three or more"] >= 6


def two(**settings: object) -> Life:
    """Two requests one after the other."""
    asks = tuple(
        Ask(at=20 * (line - 2), line=line, length=131, tokens=12, wish="greedy") for line in (2, 3)
    )
    plain = {**drawn(0).engine, **PLAIN, "chunk_tokens": 64, "max_running": 4, "query_max": 64}
    return msgspec.structs.replace(
        drawn(0),
        family="deepseek_v32",
        form="f32",
        engine={**plain, **settings},
        chunks=4,
        slot_floor=16,
        host_pages=20,
        index_pages=20,
        lines=4,
        right=0.5,
        drifts=False,
        asks=asks,
        hits=(),
    )


def wrong_drafts_are_kept(patch: pytest.MonkeyPatch) -> Life:
    patch.setattr(verification, "_accepted", lambda drafts, targets: tuple(targets))
    return two(mtp=4)


def any_text_finds_any_page(patch: pytest.MonkeyPatch) -> Life:
    """A page is known by the salt and by how many pages are before it."""

    def of_place(parent: bytes, text: memoryview) -> bytes:
        return whole(parent, memoryview(array("q", [0] * len(text))))

    whole = prefix._hashed
    patch.setattr(prefix, "_hashed", of_place)
    return two()


@pytest.mark.parametrize("planted", [wrong_drafts_are_kept, any_text_finds_any_page])
def test_a_planted_mistake_is_found_and_cut_down(
    planted: Callable[[pytest.MonkeyPatch], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planted(monkeypatch)

    def fails(less: Life) -> bool:
        try:
            live(less)
        except (Wrong, AssertionError):
            return True
        return False

    assert fails(plan)
    assert len(shrunk(plan, fails).asks) == (1 if planted is wrong_drafts_are_kept else 2)
    monkeypatch.undo()
    assert not fails(plan)
