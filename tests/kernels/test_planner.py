"""The native planner against its specification: the same calls on the same arrays, bit for bit.

Run as a script it plays one campaign, so that other instruction sets can be asked for by ESS_ISA.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ess.errors import BadInput
from ess.kernels import native
from ess.pool import lru, planner
from ess.pool.arena import Arena, Split, make_scratch

needs_native = pytest.mark.skipif(not native.available(), reason=native.why_missing())
pytestmark = needs_native

ROW_COUNT = 40 * 64
SLAB = ("row_of", "last_use", "ticket_of", "dirty")
SPLIT = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")


def ids(values):
    return np.array(values, np.int32)


def assert_equal(name, expected, found):
    for field, array in expected.items():
        if not np.array_equal(found[field], array):
            np.testing.assert_array_equal(found[field], array, err_msg=f"{name}: {field}")


class Side:
    """Two groups on one slab, driven through one implementation."""

    def __init__(self, operations, group_blocks):
        self.operations = operations
        slot_count = 64 * (sum(group_blocks) + 1)
        shared = dict(zip(SLAB, np.zeros((3, slot_count), np.int32), strict=False))
        shared["row_of"] -= 1
        shared |= {"dirty": np.zeros(slot_count, np.uint8), "scratch": make_scratch(slot_count)}
        starts = np.split(64 * np.arange(sum(group_blocks)), np.cumsum(group_blocks)[:-1])
        self.arenas = [
            Arena(
                slot_of=np.full(ROW_COUNT, -1, np.int32),
                blocks=start.astype(np.int32),
                hit_age=np.zeros(256, np.int64),
                **shared,
            )
            for start in starts
        ]
        self.split = Split.create(query_count=6, top_k=420)

    def call(self, name, group, *arguments, **options):
        if name == "plan":
            options["split"] = self.split
        home = self.arenas if name.endswith("_each") else self.arenas[group]
        found = getattr(self.operations, name)(home, *arguments, **options)
        if isinstance(found, lru.Claims):
            return {field: np.array(getattr(found, field)) for field in found.__slots__}
        return {"result": np.array(found)}

    def everything(self):
        arrays = {f"slot_of[{g}]": arena.slot_of for g, arena in enumerate(self.arenas)}
        arrays |= {f"hit_age[{g}]": arena.hit_age for g, arena in enumerate(self.arenas)}
        arrays |= {name: getattr(self.arenas[0], name) for name in SLAB}
        return arrays | {f"split.{name}": getattr(self.split, name) for name in SPLIT}


class Twins:
    """Both sides under one sequence of calls; they must agree after every one."""

    def __init__(self, group_blocks=(3, 2)):
        self.sides = [Side(lru, group_blocks), Side(planner, group_blocks)]
        self.step, self.ticket = 255, 0
        self.flying = []
        self.seen = Counter()

    @property
    def arenas(self):
        return self.sides[0].arenas

    def both(self, name, group, *arguments, **options):
        results = []
        for side in self.sides:
            given = [np.copy(a) if isinstance(a, np.ndarray) else a for a in arguments]
            written = {n: np.copy(a) for n, a in options.items() if isinstance(a, np.ndarray)}
            result = side.call(name, group, *given, **options | written)
            results.append(result | written)
        assert_equal(name, *results)
        assert_equal(name, *(side.everything() for side in self.sides))
        for arena in self.arenas:
            lru.check(arena, step=self.step)
        return results[0]

    def fetch(self, name, group, *arguments):
        self.ticket += 1
        claims = self.both(name, group, *arguments, step=self.step, ticket=self.ticket)
        if claims["slots"].size:
            self.flying.append((group, self.ticket, claims["slots"]))
        for field in ("place_count", "late_ticket", "evicted_count", "hit_count"):
            self.seen[f"{name} {field}"] += bool(claims[field])
        return claims

    def land(self, at):
        group, ticket, slots = self.flying.pop(at)
        self.both("land", group, slots, ticket=ticket)

    def write(self, group, rows):
        arenas = self.arenas if group is None else [self.arenas[group]]
        if any(arena.ticket_of[arena.slot_of[rows]].any() for arena in arenas):
            return
        if group is None:
            out = {"out": np.full((2, rows.size), -7, np.int32), "absent": ids([-7, -7])}
            done = self.both("claim_each", None, rows, step=self.step, **out)
            self.seen["claim_each", int(done["result"])] += 1
        else:
            done = self.both("claim_new", group, rows, step=self.step, out=np.full_like(rows, -7))
            self.seen["claim_new", bool(done["result"])] += 1

    def settle(self, group):
        slots = self.arenas[group].slots
        self.both("settle", group, ids(slots[self.arenas[group].dirty[slots] != 0]))

    def move_block(self, source, target, which):
        """A block changes its owner, as when budgets are divided anew."""
        blocks = self.arenas[source].blocks
        if blocks.size < 2:
            return
        block = int(blocks[which % blocks.size])
        if not self.both("clear_block", source, block, step=self.step)["result"]:
            self.seen["block held"] += 1
            return
        for side in self.sides:
            giver, taker = side.arenas[source], side.arenas[target]
            giver.blocks = giver.blocks[giver.blocks != block]
            taker.blocks = np.sort(np.append(taker.blocks, np.int32(block)))
        self.seen["block moved"] += 1


class Campaign(Twins):
    """Requests with page tables over one set of row ids; some share their first pages."""

    def __init__(self, seed):
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.chance = random.Random(seed)
        self.tables = np.full((4, 10), -1, np.int32)
        self.lengths = ids([0, 0, 0, 0])
        self.recent = [np.zeros(0, np.int32) for _ in range(4)]
        for request in range(4):
            self.start(request)

    def start(self, request):
        used = set(self.tables[np.arange(4) != request].reshape(-1).tolist())
        unused = [page for page in range(ROW_COUNT // 64) if page not in used]
        pages = ids(self.chance.sample(unused, 10))
        if request % 2 and self.chance.random() < 0.6:
            pages[:4] = self.tables[request - 1, :4]  # an equal prefix: the same row ids
        self.tables[request] = pages
        self.lengths[request] = self.chance.choice([9, 70, 333, 640])
        self.recent[request] = np.zeros(0, np.int32)

    def stop(self, request):
        rest = self.tables[np.arange(4) != request]
        gone = self.tables[request][~np.isin(self.tables[request], rest)]
        rows = ids((gone[:, None] * 64 + np.arange(64)).reshape(-1))
        if self.chance.random() < 0.5:
            self.both("drop_each", None, rows)
        for group in range(2):
            self.both("drop", group, rows)
        self.start(request)

    def selection(self, request, top_k):
        """Mostly what was selected lately; padded when the context is shorter than top-k."""
        length = int(self.lengths[request])
        fresh = self.random.choice(length, min(length, top_k // 6 + 1), replace=False)
        pool = np.unique(np.concatenate([self.recent[request], fresh])).astype(np.int32)
        chosen = np.sort(self.random.choice(pool, min(pool.size, top_k), replace=False))
        self.recent[request] = chosen
        line = np.full(top_k, -1, np.int32)
        line[: chosen.size] = chosen
        if self.chance.random() < 0.2:
            self.random.shuffle(line)  # pads anywhere
        if self.chance.random() < 0.2:
            line[-(top_k // 4) :] = line[: top_k // 4]  # duplicates in one query
        return line

    def rows_of(self, requests, top_k):
        selection = np.stack([self.selection(request, top_k) for request in requests])
        outs = np.full((2, *selection.shape), -7, np.int32)
        for operations, out in zip((lru, planner), outs, strict=True):
            operations.translate(
                selection, self.tables, ids(requests), self.lengths[requests], out=out
            )
        np.testing.assert_array_equal(outs[1], outs[0])
        return outs[0]

    def one_step(self):
        self.step += self.chance.choice([1, 1, 1, 2, 90])
        top_k = self.chance.choice([16, 48, 48, 160, 420])
        group = self.chance.randrange(2)
        writer = self.chance.randrange(4)
        last = self.tables[writer, (self.lengths[writer] - 1) // 64] * 64
        self.write(group, ids(last + self.random.choice(64, 3, replace=False)))
        parts = [[0, 0, 1], [2, 3, 3, 2]] if self.chance.random() < 0.6 else [[0, 1, 2, 3]]
        for part in parts:
            self.fetch("plan", group, self.rows_of(part, top_k))
        rows = ids(self.random.choice(ROW_COUNT, 40, replace=False))
        self.write(self.chance.choice([group, None]), rows)
        for at in reversed(range(len(self.flying))):
            if self.chance.random() < 0.8:
                self.land(at)
        self.between_steps(group)

    def between_steps(self, group):
        event = self.chance.randrange(12)
        if event < 6:
            self.settle(group)
        elif event == 6:
            self.stop(self.chance.randrange(4))
        elif event == 7:
            self.settle(group)
            self.step += self.chance.randrange(2)
            self.move_block(group, 1 - group, self.chance.randrange(8))
        elif event == 8:
            pages = np.unique(self.tables[self.chance.randrange(4)])
            rows = ids((pages[:, None] * 64 + np.arange(64)).reshape(-1))
            self.fetch("fill", group, self.random.permutation(rows))
        elif event == 9:
            rows = ids(self.random.choice(ROW_COUNT, 90, replace=False))
            ages = np.sort(self.random.integers(1, self.chance.choice([9, 300]), 90))
            self.fetch("warm", group, rows, ids(ages))


def campaign(seed, step_count):
    world = Campaign(seed)
    for _ in range(step_count):
        world.one_step()
    return world.seen


def test_two_hundred_steps_agree():
    assert_every_case_was_met(campaign(7, 200))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_thousand_steps_agree(seed):
    assert_every_case_was_met(campaign(seed, 500))


def assert_every_case_was_met(seen):
    expected = {
        *("plan place_count", "plan late_ticket", "plan evicted_count", "plan hit_count"),
        *("warm evicted_count", "block moved", "block held"),
        *(("claim_new", True), ("claim_new", False)),
        *(("claim_each", done_count) for done_count in range(3)),
    }
    assert not expected - {name for name, count in seen.items() if count}, "never met"


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_other_instruction_sets_agree(isa):
    if native.isa() == "portable" or (isa == "avx2" and native.isa() != "avx512"):
        pytest.skip(f"this machine has no set above {isa}")
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "ESS_ISA": isa, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
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
    for operations, arena, split in zip((lru, planner), arenas, splits, strict=True):
        claims = operations.plan(arena, rows, step=1000, ticket=1, split=split)
        lru.check(arena, step=1000)
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


BAD_TRANSLATIONS = {"below": (0, 0, -2), "past the end": (1, 3, 130), "no page": (1, 0, 70)}


@pytest.mark.parametrize(
    ("query", "column", "position"), BAD_TRANSLATIONS.values(), ids=BAD_TRANSLATIONS
)
def test_a_bad_position_is_refused_in_the_same_words(query, column, position):
    table = np.array([[5, -1, 9]], np.int32)
    selection = np.array([[0, 1, 2, -1], [0, 128, 129, -1]], np.int32)
    selection[query, column] = position
    sentences = []
    for operations in (lru, planner):
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


@pytest.mark.parametrize("operations", [lru, planner], ids=["specification", "native"])
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
    for operations in (lru, planner):
        side = Side(operations, (1, 1))
        arena = side.arenas[0]
        arena.slot_of[3], arena.row_of[5], arena.last_use[5] = 5, 3, 301
        with pytest.raises(AssertionError, match="after"):
            side.call("plan", 0, ids([[3]]), step=300, ticket=1)


class TwinsMachine(RuleBasedStateMachine):
    """Hypothesis chooses the calls and shrinks what fails."""

    rows = st.lists(st.integers(-1, 200), min_size=12, max_size=12)
    group = st.integers(0, 1)

    @initialize(blocks=st.sampled_from([(1, 1), (2, 1)]))
    def begin(self, blocks):
        self.twins = Twins(blocks)

    @rule(passed=st.sampled_from([1, 2, 254, 300]))
    def next_step(self, passed):
        self.twins.step += passed

    @rule(group=group, queries=st.lists(rows, min_size=1, max_size=6))
    def plan(self, group, queries):
        self.twins.fetch("plan", group, ids(queries))

    @rule(group=group, first=st.integers(0, 150))
    def plan_wide(self, group, first):
        self.twins.fetch("plan", group, ids([range(first, first + 100)]))

    @rule(group=group, rows=st.sets(st.integers(0, 200), max_size=9))
    def write(self, group, rows):
        self.twins.write(group, ids(list(rows)))

    @rule(group=group)
    def settle(self, group):
        self.twins.settle(group)

    @rule(group=group, rows=st.sets(st.integers(0, 200), max_size=70))
    def fill(self, group, rows):
        self.twins.fetch("fill", group, ids(list(rows)))

    @rule(group=group, rows=st.dictionaries(st.integers(0, 200), st.integers(1, 300), max_size=20))
    def warm(self, group, rows):
        self.twins.fetch("warm", group, ids(list(rows)), ids(sorted(rows.values())))

    @rule(at=st.integers(0, 9))
    def land(self, at):
        if self.twins.flying:
            self.twins.land(at % len(self.twins.flying))

    @rule(group=group, page=st.integers(0, 3))
    def drop(self, group, page):
        self.twins.both("drop", group, ids(range(page * 64, page * 64 + 64)))

    @rule(source=group, which=st.integers(0, 2))
    def move_block(self, source, which):
        self.twins.move_block(source, 1 - source, which)

    @invariant()
    def sound(self):
        for arena in self.twins.arenas if hasattr(self, "twins") else ():
            lru.check(arena, step=self.twins.step)


TwinsMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestTwins = TwinsMachine.TestCase


if __name__ == "__main__":
    campaign(11, 60)
    print(f"{native.isa()} agrees")
