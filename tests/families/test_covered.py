"""Every served family in every way of an engine: the tokens are those of the plain model.

In each case of the scenario (`tests.model.grid`) requests join midway, are preempted, resumed and
cancelled, meet a prefix that is there already, and have prompts longer than a chunk.
"""

from __future__ import annotations

import pytest

from ess.models.registry import MODULES
from tests.model import grid
from tests.support.pairwise import all_pairs, pairs_of, pairwise

DRAFTING = ("deepseek_v32", "glm_moe_dsa")
FURTHER = ("axk2", "hy_v4", "mistral_large4", "dots3_note", "glm5_next")
FACTORS = {
    "checkpoint": (*DRAFTING, *FURTHER),
    **{name: grid.FACTORS[name] for name in ("mode", "mtp", "tbo", "sbo", "depth")},
    **{name: grid.FACTORS[name] for name in ("arena", "warm", "evict")},
    "chunk": ("64", "96", "192"),
}
BARRED = {
    (("checkpoint", family), ("mtp", count))
    for family in FURTHER
    for count in grid.FACTORS["mtp"]
    if count != "1"
}
WAYS = pairwise(FACTORS, barred=BARRED)
# For each family a case that misses rows.
FIRST = {
    way["checkpoint"]: way
    for way in WAYS[::-1]
    if way["arena"] != "ample" and way["mode"] != "resident"
}
REST = [way for way in WAYS if way not in FIRST.values()]


def named(way: dict[str, str]) -> str:
    return "-".join(way.values())


def test_every_pair_of_settings_meets_that_may() -> None:
    met = set().union(*map(pairs_of, WAYS))
    assert met == all_pairs(FACTORS) - BARRED
    assert len(WAYS) < 45


def test_every_family_of_an_engine_is_here() -> None:
    """Beside the guest and the family of entries, which have tests of their own."""
    elsewhere = {"llama", "deepseek_v4", "dots3_note_text", "glm5_next_text"}
    assert {*FACTORS["checkpoint"]} == MODULES.keys() - elsewhere


@pytest.mark.parametrize("way", FIRST.values(), ids=named)
def test_an_engine_says_what_the_plain_model_says(way: dict[str, str]) -> None:
    assert grid.differences(way) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", REST, ids=named)
def test_it_says_so_in_every_way(way: dict[str, str]) -> None:
    assert grid.differences(way) == []
