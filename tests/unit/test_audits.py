"""Every owner of state finds a fault in itself: each case breaks one thing, the audit names it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.step.underway.future import FutureMap
from ess.engine.tokens.sampling import Sampling
from ess.overlap.tbo import interleave
from ess.overlap.timeline import Span, Timeline
from ess.pool.index import IndexPool, PageTables
from ess.pool.latent import LatentPool
from ess.pool.lru.arena import Split
from ess.pool.sparse import SparsePool
from tests.support.layouts import PLAIN as LAYOUT
from tests.support.manual_clock import ManualClock


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


class World:
    """Four host pages, of which three are active on the first of two lines and one is shared."""

    def __init__(self) -> None:
        self.latent = LatentPool(LAYOUT, np.zeros(6 * LAYOUT.host_page_bytes, np.uint8))
        memory = np.zeros(5 * LAYOUT.index_page_bytes, np.uint8)
        self.index = IndexPool(LAYOUT, memory, page_count=5, host_page_count=6)
        self.tables = PageTables(sequence_max=3, page_max=4)
        self.sparse = SparsePool(LAYOUT, np.zeros(4 * 64 * 8, np.uint8), row_id_count=320)
        host = self.latent.take(4)
        self.open_line(host[:3], 130)
        self.open_line(host[:1], 64)
        rows = np.arange(64, dtype=np.int32)
        for layer in range(LAYOUT.layer_count):
            self.latent.mark_rows(layer, rows)
            self.latent.mark_keys(layer, rows)
        self.latent.publish(0, b"a text")
        self.latent.drop(host[3:])
        self.sparse.begin_step()
        split = Split.create(query_count=1, top_k=4)
        self.sparse.commit(self.sparse.plan(0, ids(3, 5, 7, -1)[None], split))

    def open_line(self, host: np.ndarray, length: int) -> None:
        line = self.tables.take()
        self.tables.lines[line, : len(host)] = self.index.activate(host, self.latent)
        self.tables.lengths[line] = length

    def check(self) -> None:
        for owner in (self.latent, self.index, self.sparse):
            owner.check()
        self.tables.check(self.index.pages)


def stored_in_a_free_page(world: World) -> None:
    world.latent.stored[1, 5] = 1


def keyed_in_a_free_page(world: World) -> None:
    world.latent.keyed[0, 5] = 1


def an_idle_page_that_is_held(world: World) -> None:
    world.latent.prefix.idle(0)


def a_published_page_with_a_gap(world: World) -> None:
    world.latent.stored[1, 0] -= np.uint64(1)


def a_page_that_is_nowhere(world: World) -> None:
    world.latent.pages.drop(ids(2))


def a_text_that_leads_elsewhere(world: World) -> None:
    world.latent.prefix._page_of[b"a text"] = 3


def an_active_page_that_maps_elsewhere(world: World) -> None:
    world.index.host_page_of[1] = 4


def a_free_page_with_a_host_page(world: World) -> None:
    world.index.host_page_of[4] = 5


def a_leaving_page_without_a_host_page(world: World) -> None:
    leaving = world.index.leave(world.tables.lines[0, 2:3])
    world.tables.lines[0, 2] = -1
    world.tables.lengths[0] = 128
    world.index.host_page_of[leaving] = -1


def a_length_beyond_the_pages(world: World) -> None:
    world.tables.lengths[0] = 193


def a_taken_line_without_a_length(world: World) -> None:
    world.tables.lengths[1] = -1


def a_gap_in_a_line(world: World) -> None:
    world.tables.lines[0, 1] = -1


def a_free_line_with_a_page(world: World) -> None:
    world.tables.lines[2, 0] = 1


def a_free_line_with_a_length(world: World) -> None:
    world.tables.lengths[2] = 0


def a_line_that_is_free_twice(world: World) -> None:
    world.tables._free *= 2


def a_page_that_no_line_names(world: World) -> None:
    world.index.pages.hold(world.tables.lines[0, :1])


def a_row_in_a_slot_of_another_group(world: World) -> None:
    world.sparse.slot_of[0, 300] = world.sparse._arenas[1].slots[0]


def a_row_in_a_slot_that_is_none(world: World) -> None:
    world.sparse.slot_of[0, 300] = 1 << 20


def a_slot_used_in_the_future(world: World) -> None:
    world.sparse._last_use[200] = world.sparse.step + 1


def a_copy_that_was_never_planned(world: World) -> None:
    world.sparse._ticket_of[0] = 9


def a_slot_that_is_not_counted(world: World) -> None:
    world.sparse._counts.used[0] -= 1


def a_group_without_a_chunk(world: World) -> None:
    world.sparse.chunks._owner_of[:] = 0


def a_chunk_that_is_not_counted(world: World) -> None:
    world.sparse.chunks._owner_of[-1] = 0


FAULTS = {
    stored_in_a_free_page: "free page 5 has stored rows",
    keyed_in_a_free_page: "free page 5 has index keys",
    an_idle_page_that_is_held: "idle page 0 is held",
    a_published_page_with_a_gap: "published page 0 is not complete",
    a_page_that_is_nowhere: "free . held . idle pages",
    a_text_that_leads_elsewhere: "3",
    an_active_page_that_maps_elsewhere: "active page 1 maps elsewhere",
    a_free_page_with_a_host_page: "active . leaving . free pages",
    a_leaving_page_without_a_host_page: "active . leaving . free pages",
    a_length_beyond_the_pages: "line 0: 193 positions on 3 pages",
    a_taken_line_without_a_length: "line 1: -1 positions on 1 pages",
    a_gap_in_a_line: "line 0 has a page behind a gap",
    a_free_line_with_a_page: "a free line has pages",
    a_free_line_with_a_length: "a free line has a length",
    a_line_that_is_free_twice: "names a line twice",
    a_page_that_no_line_names: "page 0: 3 holders, but 2 lines name it",
    a_row_in_a_slot_of_another_group: "300 .a row. has a slot that the group does not own",
    a_row_in_a_slot_that_is_none: "300 .a row. has a slot that the group does not own",
    a_slot_used_in_the_future: "was used after step",
    a_copy_that_was_never_planned: "was never planned",
    a_slot_that_is_not_counted: "group 0 counts 2 used slots, has 3",
    a_group_without_a_chunk: "a group owns no chunk",
    a_chunk_that_is_not_counted: r"\[3, 1\] chunks of the groups, and \[2, 2\] by count",
}


def test_a_sound_world_passes_its_audit() -> None:
    World().check()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_audit_finds(fault: Callable[[World], None]) -> None:
    world = World()
    fault(world)
    with pytest.raises((AssertionError, KeyError), match=FAULTS[fault]):
        world.check()


def test_a_page_in_use_is_never_freed() -> None:
    world = World()
    with pytest.raises(AssertionError, match="a page that sequences still use was freed"):
        world.index.free(world.tables.lines[0, 1:2])


def test_a_fork_writes_to_a_page_of_its_own() -> None:
    world = World()
    with pytest.raises(AssertionError, match="its text cannot change"):
        world.latent.copy_page(1, 0)
    world.latent.hold(ids(2))
    with pytest.raises(AssertionError, match="not the fork's alone"):
        world.latent.copy_page(1, 2)


def test_no_line_is_taken_when_none_is_free() -> None:
    tables = PageTables(sequence_max=1, page_max=1)
    tables.take()
    with pytest.raises(AssertionError, match="all 1 lines are taken"):
        tables.take()


def test_no_page_is_forgotten_when_none_is_idle() -> None:
    with pytest.raises(AssertionError, match="no page is idle"):
        World().latent.prefix.forget_oldest(1)


def test_a_landed_plan_is_not_committed_again() -> None:
    sparse = World().sparse
    landed = SimpleNamespace(group=0, is_landed=True)
    with pytest.raises(AssertionError, match="a plan that has landed was committed"):
        sparse.commit(landed)


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lambda roster: setattr(roster.first_waiting(), "state", "decoding"), "is decoding, not"),
        (lambda roster: setattr(roster.first_waiting(), "number", 9), "9 is listed as 2"),
        (lambda roster: roster._ranks.clear(), "and have no rank"),
        (lambda roster: roster._ranks.reverse(), "no heap"),
    ],
    ids=["another state", "another number", "no rank", "no heap"],
)
def test_the_roster_audits_itself(fault: Callable[[Roster], None], finding: str) -> None:
    roster = Roster()
    for number, priority in enumerate((2, 1, 0)):
        roster.add(Request(number=number, prompt=[1], sampling=Sampling(), priority=priority))
    roster.check()
    fault(roster)
    with pytest.raises(AssertionError, match=finding):
        roster.check()


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lambda future: future._tokens[0].extend([7, 8]), "line 0: 4 tokens"),
        (lambda future: future._tokens[0].__setitem__(1, -2), "a token below zero"),
        (lambda future: future._outcomes.reverse(), "do not ascend"),
    ],
    ids=["too many", "no token", "order"],
)
def test_the_future_audits_itself(fault: Callable[[FutureMap], None], finding: str) -> None:
    future = FutureMap(line_max=2, token_max=3)
    future.stash(0, [5, 6])
    future.tell(7, [])
    future.tell(8, [])
    future.check()
    fault(future)
    with pytest.raises(AssertionError, match=finding):
        future.check()


def test_a_timeline_audits_itself() -> None:
    timeline = Timeline(clock=ManualClock(), keeps_spans=True)
    stages = SimpleNamespace(timeline=timeline, number=0, first_query=0)
    timeline.note(stages, "attend", 0)
    timeline.check()
    timeline.spans.append(Span(0, 0, "attend", 2, 1))
    with pytest.raises(AssertionError, match="a span ends early"):
        timeline.check()
    timeline.spans.pop()
    del timeline.run_count["attend"]
    with pytest.raises(AssertionError, match="never ran"):
        timeline.restart()


def test_a_half_cannot_run_beside_itself() -> None:
    run = (None for _ in range(3))
    with pytest.raises(AssertionError, match="beside itself"):
        interleave(run, run)
