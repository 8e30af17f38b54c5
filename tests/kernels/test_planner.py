"""The native planner against its specification: the same calls on the same arrays, bit for bit.

Run as a script it plays one campaign, so that other instruction sets can be asked for by ESS_ISA.
"""

from __future__ import annotations

import numpy as np
import pytest

from ess.errors import BadInput
from ess.kernels.cpu import native
from ess.pool.lru import planner, specification
from ess.pool.lru.arena import Arena, Split
from ess.pool.lru.eviction import POLICIES
from tests.support.built import needs_native
from tests.support.own_python import python
from tests.support.twins import ROW_COUNT, Side, Twins, assert_every_case_was_met, campaign, ids

pytestmark = needs_native


@pytest.mark.parametrize("evict", POLICIES)
def test_two_hundred_steps_agree(evict):
    assert_every_case_was_met(campaign(7, 200, evict))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("evict", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_five_hundred_steps_agree(seed, evict):
    assert_every_case_was_met(campaign(seed, 500, evict))


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_other_instruction_sets_agree(isa):
    if native.isa() == "portable" or (isa == "avx2" and native.isa() != "avx512"):
        pytest.skip(f"this machine has no set above {isa}")
    run = python(__file__, ESS_ISA=isa)
    assert (run.returncode, run.stdout) == (0, f"{isa} agrees\n"), run.stderr


@pytest.mark.parametrize("slot_count", [64, 4096])
@pytest.mark.parametrize("wanted", [1, 700, 5000])
def test_the_oldest_among_many(slot_count, wanted):
    """Arenas larger than a batch of candidates: the floor rises within the pass."""
    random_source = np.random.default_rng(wanted)
    arenas = [Arena.alone(row_count=20_000, slot_count=slot_count) for _ in range(2)]
    age = random_source.permutation(np.arange(slot_count) // 3 % 300)
    for arena in arenas:
        arena.slot_of[10_000 : 10_000 + slot_count] = arena.row_of = ids(range(slot_count))
        arena.row_of = arena.row_of + np.int32(10_000)
        arena.last_use = (1000 - age).astype(np.int32)
        arena.dirty[::7] = 1
    splits = [Split.create(query_count=1, top_k=wanted) for _ in range(2)]
    rows = np.arange(wanted, dtype=np.int32)[None]
    for operations, arena, split in zip((specification, planner), arenas, splits, strict=True):
        claims = operations.plan(arena, rows, step=1000, ticket=1, split=split)
        specification.check(arena, step=1000)
        assert claims.slots.size == min(
            wanted, np.sum((age > 0) & (np.arange(slot_count) % 7 != 0))
        )
    np.testing.assert_array_equal(arenas[1].slot_of, arenas[0].slot_of)
    np.testing.assert_array_equal(splits[1].slots, splits[0].slots)


def test_a_copy_lands_only_where_its_ticket_still_is():
    twins = Twins()
    claims = twins.fetch("plan", 0, ids([range(20)]))
    twins.both("drop", 0, ids(range(10)))
    twins.fetch("plan", 0, ids([range(30, 35)]))
    assert set(twins.arenas[0].ticket_of[claims["slots"]].tolist()) == {0, 1, 2}
    twins.land(0)
    assert set(twins.arenas[0].ticket_of[claims["slots"]].tolist()) == {0, 2}


@pytest.mark.parametrize(
    "rows",
    [range(16, 48), range(0, 96, 3), [*range(16, 31), 90], [5], range(80, 60, -1), [7] * 20],
    ids=["run", "strided", "broken run", "one", "descending", "repeated"],
)
def test_rows_leave_in_whatever_order_they_are_named(rows):
    twins = Twins()
    twins.fetch("plan", 0, ids([range(40, 100)]))
    gone = len({row for row in rows if 40 <= row < 100})
    assert twins.both("drop", 0, ids(rows))["result"] == gone


@pytest.mark.parametrize("age", [1, 253, 254, 255, 256])
def test_warm_ages_around_saturation(age):
    twins = Twins((1, 1))
    twins.fetch("plan", 0, ids([range(64)]))
    twins.land(0)
    twins.step += 255
    claims = twins.fetch("warm", 0, ids(range(100, 110)), ids([age] * 10))
    assert claims["slots"].size == (10 if age < 255 else 0)


BAD_TRANSLATIONS = {
    "below": (0, 0, -2),
    "past the end": (1, 3, 130),
    "no page": (1, 0, 70),
    "descends": (1, 2, 5),
    "twice": (0, 1, 0),
}


@pytest.mark.parametrize(
    ("query", "column", "position"), BAD_TRANSLATIONS.values(), ids=BAD_TRANSLATIONS
)
def test_a_bad_position_is_refused_in_the_same_words(query, column, position):
    table = np.array([[5, -1, 9]], np.int32)
    selection = np.array([[0, 1, 2, -1], [0, 128, 129, -1]], np.int32)
    selection[query, column] = position
    sentences = []
    for operations in (specification, planner):
        out = np.full_like(selection, 77)
        with pytest.raises(BadInput, match=rf"selection\[{query}, {column}\]") as refused:
            operations.translate(selection, table, ids([0, 0]), ids([130, 130]), out=out)
        sentences.append(str(refused.value))
        assert (out == 77).all()
    assert sentences[0] == sentences[1]


def flying_row(arena):
    arena.slot_of[3], arena.row_of[5], arena.ticket_of[5] = 5, 3, 9
    return arena


REFUSED = {
    "row id too large": ("plan", (ids([[ROW_COUNT]]),), {"ticket": 1}),
    "row id below -1": ("plan", (ids([[-2]]),), {"ticket": 1}),
    "more than the split": ("plan", (ids([[1] * 500]),), {"ticket": 1}),
    "no ticket": ("plan", (ids([[1]]),), {"ticket": 0}),
    "wrong type": ("plan", (np.zeros((1, 4), np.int64),), {"ticket": 1}),
    "twice": ("claim_new", (ids([1, 2, 1]),), {"out": ids([0, 0, 0])}),
    "resident twice": ("claim_new", (ids([4, 4]),), {"out": ids([0, 0])}),
    "in flight": ("claim_new", (ids([1, 3]),), {"out": ids([0, 0])}),
    "a pad": ("claim_new", (ids([-1]),), {"out": ids([0])}),
    "short out": ("claim_new", (ids([1, 2]),), {"out": ids([0])}),
    "warm twice": ("warm", (ids([1, 1]), ids([1, 2])), {"ticket": 1}),
    "age 0": ("warm", (ids([1]), ids([0])), {"ticket": 1}),
    "descending": ("warm", (ids([1, 2]), ids([2, 1])), {"ticket": 1}),
    "dropped pad": ("drop", (ids([-1]),), None),
    "slot too large": ("land", (ids([999_999]),), {"ticket": 1}),
    "settled too large": ("settle", (ids([5, 999_999]),), None),
    "a free slot": ("settle", (ids([5, 7]),), None),
    "dropped pad in each": ("drop_each", (ids([-1]),), None),
    "twice in each": (
        "claim_each",
        (ids([1, 1]),),
        {"out": np.zeros((2, 2), np.int32), "absent": ids([0, 0])},
    ),
}


@pytest.mark.parametrize("operations", [specification, planner], ids=["specification", "native"])
@pytest.mark.parametrize(("name", "arguments", "options"), REFUSED.values(), ids=REFUSED)
def test_both_refuse_the_same_and_change_nothing(operations, name, arguments, options):
    side = Side(operations, (2, 2))
    arena = flying_row(side.arenas[0])
    arena.slot_of[4], arena.row_of[6] = 6, 4
    before = {field: array.copy() for field, array in side.everything().items()}
    options = {} if options is None else options
    if name in ("plan", "claim_each", "claim_new", "warm"):
        options = options | {"step": 300}
    with pytest.raises(AssertionError):
        side.call(name, 0, *arguments, **options)
    for field, array in side.everything().items():
        np.testing.assert_array_equal(array, before[field], err_msg=field)


def test_a_slot_used_after_the_step_is_refused_by_both():
    for operations in (specification, planner):
        side = Side(operations, (1, 1))
        arena = side.arenas[0]
        arena.slot_of[3], arena.row_of[5], arena.last_use[5] = 5, 3, 301
        with pytest.raises(AssertionError, match="after"):
            side.call("plan", 0, ids([[3]]), step=300, ticket=1)


if __name__ == "__main__":
    for evict in POLICIES:
        campaign(11, 60, evict)
    print(f"{native.isa()} agrees")
