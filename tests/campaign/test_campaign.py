"""Seeds that all go well, play alike, and find mistakes that are planted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ess.door.handoff.incoming import receiver
from ess.door.handoff.outgoing import departure, sender
from ess.engine.layers.selected import SelectedRows
from ess.pool.disk import tier, writer
from ess.transfer import arrivals
from ess.transfer.transports.faulty import Fault
from tests.campaign import world
from tests.campaign.classes import CLASSES, table
from tests.campaign.disks import DAMAGES, DISK_FAULTS
from tests.campaign.plan import PLAIN, SORTS, STRIKES, Ask, Hit, Plan, drawn, of_v4
from tests.campaign.shrink import shrunk
from tests.campaign.world import answer, play
from tests.support.few import few

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SEEDS = range(6)
MORE = [range(first, first + 25) for first in range(6, 506, 25)]
PARTS = few([SEEDS], all_of=[SEEDS, *MORE])
"""Parts take less than the limit of a test, on a busy machine too, and workers share them."""
OF_V4 = range(5, 8)
"""Drafts that are right, prefixes found, transfers late and in another order, workers started anew
and requests cancelled while they wait and land."""


@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_every_answer_is_right_and_every_page_is_free(seeds: range) -> None:
    for seed in seeds:
        told = play(drawn(seed))
        assert told.ends, seed


@pytest.mark.parametrize("seeds", few([OF_V4], all_of=[OF_V4, SEEDS, *MORE]), ids=str)
def test_so_it_is_where_a_state_is_handed_over_too(seeds: range) -> None:
    for seed in seeds:
        told = play(of_v4(drawn(seed)))
        assert told.ends, seed


def test_a_seed_plays_the_same_way_again() -> None:
    plan = drawn(3)
    again = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
    assert play(again) == play(plan)


def test_every_fault_is_drawn() -> None:
    plans = [drawn(seed) for seed in range(100)]
    assert {hit.strike for plan in plans for hit in plan.hits} == {*STRIKES}
    assert {name for plan in plans for name in plan.odds} == {fault.value for fault in Fault}
    assert {name for plan in plans for name in plan.disk_odds} == {*DISK_FAULTS}


def ask(sort: str, prompt: int, at: int = 0) -> Ask:
    return Ask(sort=sort, prompt=prompt, give_at=at, take_at=at, tokens=8, giver=0, taker=0)


def asked(sort: str, **more: object) -> Plan:
    """Two requests of a sort, and nothing else."""
    asks = tuple(ask(sort, prompt) for prompt in (9, 10))
    given = {"asks": asks, "hits": (), "odds": {}, "failure": "recompute", "host_pages": 48}
    return msgspec.structs.replace(drawn(1), **(PLAIN | given | more))


class Anything(int):
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True


def test_a_number_that_is_given_twice_is_the_first_s_whom_the_disk_brings_last() -> None:
    """Both prompts load; the second is refused when it is there, and the first goes on."""
    twice = asked(
        "twice",
        seed=5620,
        asks=(ask("twice", 10), ask("twice", 10, at=60)),
        hits=(Hit(at=50, strike="restart giver", which=0, size=1),),
        disks="all",
        disk_pages=10,
        giver_count=2,
        taker_count=1,
        mtp=1,
        chunk=16,
        host_pages=8,
        index_pages=8,
        lines=4,
    )
    assert play(twice).seen["pages loaded"] > 0


def test_a_number_that_is_given_twice_is_the_first_s_who_waits_for_room() -> None:
    """Both prompts load, and the second is offered while the first has not come back."""
    twice = asked(
        "twice",
        seed=1724,
        asks=(ask("twice", 8, at=22), ask("twice", 8, at=118)),
        hits=(Hit(at=59, strike="restart giver", which=0, size=1),),
        disks="givers",
        disk_pages=10,
        disk_delay=20,
        giver_count=1,
        taker_count=1,
        mtp=1,
        chunk=16,
        host_pages=8,
        lines=4,
    )
    told = play(twice)
    assert told.seen["pages loaded"] > 0
    assert told.ends["give: sent"] == 2


def no_checksums(patch: pytest.MonkeyPatch) -> Plan:
    patch.setattr(arrivals, "checksum", lambda parts: Anything())
    return asked("whole", odds={"partial": 0.5})


def no_leases(patch: pytest.MonkeyPatch) -> Plan:
    patch.setattr(sender.Sender, "expire", lambda self: None)
    patch.setattr(world, "TURNS_MAX", 120)
    return asked("never taken")


def any_text(patch: pytest.MonkeyPatch) -> Plan:
    """Rows of any text are taken for those of the prompt."""
    for module in (receiver, departure):
        patch.setattr(module, "text_digest", lambda *_, **__: bytes(16))
    return asked("foreign")


def no_checksums_of_disks(patch: pytest.MonkeyPatch) -> Plan:
    """A page that was written in part is read by the next process."""
    for module in (tier, writer):
        patch.setattr(module, "checksum", lambda content, parts: 7)
    return asked(
        "alone",
        asks=(ask("alone", 11), ask("alone", 9, at=40)),
        hits=(Hit(at=30, strike="restart taker", which=0, size=1),),
        disks="takers",
        disk_pages=40,
        disk_odds={"torn write": 1.0},
        taker_count=1,
    )


def fetched_rows_are_forgotten(patch: pytest.MonkeyPatch) -> Plan:
    """By DA and DBA, which only a change of settings makes of NONE."""
    for prompt in (9, 10):
        answer("small", prompt, is_warm=False)
    patch.setattr(SelectedRows, "attend_fetched", lambda self, rows, resident: resident)
    return asked("whole", slot_pages=2, drifts=True)


PLANTED = (
    *(no_checksums, no_leases, any_text, no_checksums_of_disks),
    fetched_rows_are_forgotten,
)


def fails(plan: Plan) -> bool:
    try:
        play(plan)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_mistake_is_found(planted, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planted(monkeypatch)
    assert fails(plan)
    monkeypatch.undo()
    assert not fails(plan)


@pytest.mark.parametrize("planted", few([any_text, no_checksums_of_disks], all_of=PLANTED))
def test_what_finds_it_is_cut_down(planted, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = shrunk(planted(monkeypatch), fails)
    assert len(cut.asks) == (2 if planted is no_checksums_of_disks else 1)


def test_what_the_table_of_faults_names_is_there() -> None:
    known = {*STRIKES, *SORTS, *DISK_FAULTS, *DAMAGES, *(fault.value for fault in Fault)}
    assert len(CLASSES) == 25
    for each in CLASSES:
        assert {*each.seeds} <= known, each.name
        assert each.seeds or each.tests or each.note, each.name
        for path, _, test in (name.partition("::") for name in each.tests):
            assert f"def {test}" in (TESTS / path).read_text(), f"{path}: {test}"
    assert table() in (TESTS.parent / "docs" / "reliability.md").read_text()
