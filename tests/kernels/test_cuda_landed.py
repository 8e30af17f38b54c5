"""What has landed on a device, without a kernel that says so: by lane and by place in the step."""

from __future__ import annotations

import numpy as np
import pytest

from ess.pool.lru import specification
from ess.pool.lru.arena import Arena, Split
from ess.pool.lru.cuda_shape import Moment
from tests.support.emulate import needs_compiler
from tests.support.twins import ids

pytestmark = needs_compiler


def full_arena(tickets):
    arena = Arena.alone(row_count=640, slot_count=64)
    specification.fill(arena, ids(range(64)), step=300, ticket=2)
    arena.ticket_of[:] = tickets
    return arena


@pytest.mark.parametrize(
    ("ticket", "landed", "behind", "moment", "answer"),
    [
        (8, 8, 0, Moment(), "hit"),
        (8, 6, 9, Moment(), "late"),
        (9, 8, 9, Moment(), "hit"),
        (9, 20, 7, Moment(), "in place"),
        (24, 20, 0, Moment(copy=3), "late"),
        (24, 20, 0, Moment(copy=3, waited=1), "late"),
        (24, 20, 0, Moment(copy=3, waited=2), "hit"),
        (23, 20, 21, Moment(copy=3, waited=2), "in place"),
    ],
)
def test_what_has_landed_is_told_by_lane_and_by_copies_waited_for(
    operations, ticket, landed, behind, moment, answer
):
    """The step has given out ticket 20 before it began."""
    arena, split = full_arena(ticket), Split.create(query_count=1, top_k=64)
    rows = ids(range(64))[None]
    operations.moment = moment, {"ticket": 20, "landed": landed, "behind": behind}
    operations.plan(arena, rows, step=301, ticket=2, split=split)
    counts = {"hit": split.hit_count, "late": split.miss_count, "in place": split.place_count}
    assert {name: int(count[0]) for name, count in counts.items()} == {
        name: 64 * (name == answer) for name in counts
    }
    assert operations.report["late_ticket"] == (0 if answer == "hit" else ticket)
    assert (arena.last_use == 301).all()


@pytest.mark.parametrize(("landed", "count"), [(6, 0), (8, 64)])
def test_only_what_has_landed_gives_way(operations, landed, count):
    arena, split = full_arena(8), Split.create(query_count=1, top_k=64)
    operations.moment = Moment(), {"ticket": 20, "landed": landed, "behind": 0}
    claims = operations.plan(arena, ids(range(100, 164))[None], step=301, ticket=2, split=split)
    assert claims.slots.size == count
    assert (arena.ticket_of == 22).sum() == count


@pytest.mark.parametrize("landed", [6, 8])
def test_a_block_with_a_copy_in_flight_is_held(operations, landed):
    arena = full_arena(8)
    operations.landed = [landed, 0]
    assert operations.clear_blocks(arena, ids([0]), step=400) == (landed == 8)
    assert operations.report["held"] == (0 if landed == 8 else 64)


def test_a_row_that_has_landed_is_written_again_and_is_sound(operations):
    """Its slot still has the ticket of the copy that brought it."""
    arena, rows = full_arena(8), ids([5, 6])
    operations.landed = [8, 0]
    assert operations.claim_new(arena, rows, step=301, out=np.empty(2, np.int32))
    operations.check(arena, step=301)
    operations.landed = [6, 0]
    with pytest.raises(AssertionError, match="is dirty and in flight"):
        operations.check(arena, step=301)


@pytest.mark.parametrize(("first", "counts"), [(0, [2, 2, 0]), (2, [2, 1, 0]), (5, [1, 0, 0])])
def test_a_part_takes_its_own_queries(operations, first, counts):
    """Of three queries of a step, or of none: lines beyond them are left as they are."""
    rows = ids([[1, 2], [3, 4]])
    for query_count, count in zip((6, 3, 0), counts, strict=True):
        arena, split = (
            Arena.alone(row_count=640, slot_count=64),
            Split.create(query_count=2, top_k=2),
        )
        operations.moment = Moment(first=first), {"ticket": 20, "landed": 20}
        operations.query_count = query_count
        operations.plan(arena, rows, step=301, ticket=2, split=split)
        assert (arena.row_of >= 0).sum() == 2 * count
        assert (split.slots[count:] == -1).all()
