"""What is DeepSeek-V4's own in the engine: pairs of settings, published windows, kept states."""

from __future__ import annotations

import numpy as np
import pytest

from ess.door.sequences import kept
from ess.errors import BadInput
from tests.compressed import drafting, world
from tests.model import grid
from tests.states.world import LINE, V4, V4_PUBLISHED, add, finish
from tests.support.pairwise import all_pairs, pairs_of, pairwise

FACTORS = {
    "checkpoint": ("deepseek_v4",),
    **{name: grid.FACTORS[name] for name in ("mode", "depth", "arena", "warm")},
    "mtp": ("1", "2", "4"),
    "tbo": ("off",),
    "sbo": ("off",),
    "evict": ("lru", "score"),
}
WAYS = pairwise(FACTORS)
FIRST = [way for way in WAYS if way["arena"] == "smallest" and way["mtp"] == "4"][:1]


def test_every_pair_of_settings_meets() -> None:
    assert set().union(*(pairs_of(way) for way in WAYS)) == all_pairs(FACTORS)
    assert len(WAYS) < 20


@pytest.mark.parametrize("way", FIRST, ids=lambda way: "-".join(way.values()))
def test_an_engine_says_what_the_plain_model_says(
    way: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting.known(monkeypatch, world.tiny(), seed=1)
    assert grid.differences(way) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way not in FIRST], ids=lambda way: "-".join(way.values())
)
def test_an_engine_says_it_in_every_way(
    way: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting.known(monkeypatch, world.tiny(), seed=1)
    assert grid.differences(way) == []


def test_published_windows_are_served_too() -> None:
    """Of 128 tokens, and layers of the last tokens alone."""
    with V4_PUBLISHED.engines() as engine:
        requests = [add(engine, LINE[:length]) for length in (127, 128, 131, 300)]
        finish(engine)
        for request in requests:
            assert request.output == V4_PUBLISHED.told(len(request.prompt))


def test_states_are_kept_in_bounded_memory() -> None:
    states = kept.KeptStates(10)
    for number in range(4):
        states.keep(bytes([number]), np.full(4, number, np.uint8))
    states.check()
    assert states.byte_count == 8
    contents = [bytes([number]) for number in range(4)]
    assert [states.longest(contents[:count]) for count in (4, 3, 2)] == [4, 3, 0]
    states.keep(b"large", np.zeros(11, np.uint8))
    assert len(states) == 0
    states.keep(b"again", np.zeros(5, np.uint8))
    states.emptied()
    states.check()
    assert states.byte_count == 0


def test_each_of_as_many_conversations_as_states_goes_on_from_its_own() -> None:
    """In turn, each from its last state, which it leaves for a later one."""
    states, count = kept.KeptStates(5 * 4), 5
    for turn in range(4):
        for talk in range(count):
            contents = [bytes([talk, earlier]) for earlier in range(turn)]
            assert states.longest(contents) == turn, f"turn {turn} of {talk}"
            if turn:
                states.begun(contents[-1])
            states.keep(bytes([talk, turn]), np.zeros(4, np.uint8))
            states.check()


def test_a_state_that_several_begin_with_stays() -> None:
    states = kept.KeptStates(3 * 4)
    states.keep(b"shared", np.zeros(4, np.uint8))
    for number in range(9):
        assert states.longest([b"shared", b"other"]) == 1
        states.begun(b"shared")
        states.keep(bytes([number]), np.zeros(4, np.uint8))
        states.check()


def test_where_states_are_kept() -> None:
    assert kept.kept_ends(0, 20_000, prompt_end=20_000, page_tokens=256) == [8192, 16384, 19968]
    assert kept.kept_ends(8192, 16384, prompt_end=20_000, page_tokens=256) == [16384]
    assert kept.kept_ends(16384, 19968, prompt_end=19_968, page_tokens=256) == [19968]
    assert kept.kept_ends(0, 255, prompt_end=255, page_tokens=256) == []


def test_rows_that_do_not_fit_fp8_are_refused() -> None:
    config = world.tiny().config
    with pytest.raises(
        BadInput, match="the 24 dimensions of an entry that are not turned are no m"
    ):
        config.layout()


def test_rows_that_were_not_imported_are_not_reached() -> None:
    with V4.engines() as engine:
        sequence = engine.offload.open(LINE[:5])
        with pytest.raises(BadInput, match="5 need 1 rows"):
            sequence.reached(5)
        sequence.close()
