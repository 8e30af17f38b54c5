"""The same calls on two implementations of the planner, which must agree after every one."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from ess.pool.lru import planner, specification
from ess.pool.lru.arena import Arena, Lookup, Split, make_scratch
from ess.pool.lru.eviction import Evictions

ROW_COUNT = 40 * 64
SLAB = ("row_of", "last_use", "ticket_of", "dirty")
SPLIT = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")
CLAIMED = ("slots", "rows", "hit_count", "place_count", "late_ticket", "evicted_count")


def ids(values):
    return np.array(values, np.int32)


def assert_equal(name, expected, got):
    for field, array in expected.items():
        if not np.array_equal(got[field], array):
            np.testing.assert_array_equal(got[field], array, err_msg=f"{name}: {field}")


class Side:
    """Two groups on one slab, driven through one implementation."""

    def __init__(self, operations, group_blocks, evict="lru"):
        self.operations = operations
        slot_count = 64 * (sum(group_blocks) + 1)
        shared = dict(zip(SLAB, np.zeros((3, slot_count), np.int32), strict=False))
        shared["row_of"] -= 1
        shared |= {"dirty": np.zeros(slot_count, np.uint8), "scratch": make_scratch(slot_count)}
        evictions = Evictions(evict, slot_count=slot_count, row_count=ROW_COUNT)
        starts = np.split(64 * np.arange(sum(group_blocks)), np.cumsum(group_blocks)[:-1])
        self.arenas = [
            Arena(
                slot_of=np.full(ROW_COUNT, -1, np.int32),
                blocks=start.astype(np.int32),
                hit_age=np.zeros(256, np.int64),
                eviction=evictions.group(),
                **shared,
            )
            for start in starts
        ]
        self.split = Split.create(query_count=6, top_k=420)

    def call(self, name, group, *arguments, **options):
        if name == "plan":
            options["split"] = self.split
        if not name.endswith("_each"):
            answer = getattr(self.operations, name)(self.arenas[group], *arguments, **options)
        elif hasattr(self.operations, name):
            answer = getattr(self.operations, name)(self.arenas, *arguments, **options)
        else:
            answer = getattr(self, name)(*arguments, **options)
        if isinstance(answer, specification.FetchPlan):
            return {field: np.array(getattr(answer, field)) for field in CLAIMED}
        return {"result": np.array(answer)}

    def drop_each(self, rows):
        return [self.call("drop", group, rows)["result"] for group in range(len(self.arenas))]

    def claim_each(self, rows, *, step, out, absent):
        for group, arena in enumerate(self.arenas):
            absent[group] = np.count_nonzero(arena.slot_of[rows] < 0)
            if not self.call("claim_new", group, rows, step=step, out=out[group])["result"]:
                return group
        return len(self.arenas)

    def everything(self):
        arrays = {f"slot_of[{g}]": arena.slot_of for g, arena in enumerate(self.arenas)}
        arrays |= {f"hit_age[{g}]": arena.hit_age for g, arena in enumerate(self.arenas)}
        arrays |= {name: getattr(self.arenas[0], name) for name in SLAB}
        for name in ("came", "spared", "hand", "rank_of"):
            kept = {f"{name}[{g}]": getattr(a.eviction, name) for g, a in enumerate(self.arenas)}
            arrays |= kept
        return arrays | {f"split.{name}": getattr(self.split, name) for name in SPLIT}


class Twins:
    """Both sides under one sequence of calls; they must agree after every one."""

    def __init__(self, group_blocks=(3, 2), evict="lru"):
        self.sides = [Side(twin, group_blocks, evict) for twin in (specification, planner)]
        self.evict = evict
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
            specification.check(arena, step=self.step)
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

    def score(self, group, lines, line_of, length, selection, logits):
        room, pages = np.zeros((1, 1), np.int32), np.zeros(ROW_COUNT // 64, np.int32)
        stored = np.zeros((1, 1), np.uint64)
        lookup = Lookup(
            lines=lines, host_page_of=pages, stored=stored, rows=room, host_rows=room[0]
        )
        for side in self.sides:
            given = lookup, selection, ids(line_of), length
            side.operations.observe(side.arenas[group], *given, logits=logits)
        assert_equal("observe", *(side.everything() for side in self.sides))

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

    def __init__(self, seed, evict="lru"):
        super().__init__(evict=evict)
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
        return line

    def stirred(self, rows):
        """A plan takes rows in any order: pads anywhere, duplicates in one query."""
        for line in rows:
            if self.chance.random() < 0.2:
                self.random.shuffle(line)
            if self.chance.random() < 0.2:
                line[-(line.size // 4) :] = line[: line.size // 4]
        return rows

    def observe(self, group, requests, selection):
        """Logits as an indexer gives them: some equal, one without bound, one that is none."""
        logits = self.random.normal(size=(len(requests), 10 * 64)).astype(np.float32).round(1)
        chosen = np.take_along_axis(logits, np.maximum(selection, 0), 1)
        np.put_along_axis(logits, np.maximum(selection, 0), chosen + np.float32(2), 1)
        for value in (np.nan, np.inf, -np.inf, 0.0):
            if self.chance.random() < 0.1:
                logits[:, self.chance.randrange(640)] = value
        self.score(group, self.tables, requests, self.lengths[requests], selection, logits)

    def rows_of(self, requests, top_k, group):
        selection = np.stack([self.selection(request, top_k) for request in requests])
        if self.evict == "score":
            self.observe(group, requests, selection)
        outs = np.full((2, *selection.shape), -7, np.int32)
        for operations, out in zip((specification, planner), outs, strict=True):
            operations.translate(
                selection, self.tables, ids(requests), self.lengths[requests], out=out
            )
        np.testing.assert_array_equal(outs[1], outs[0])
        return self.stirred(outs[0])

    def one_step(self):
        self.step += self.chance.choice([1, 1, 1, 2, 90])
        top_k = self.chance.choice([16, 48, 48, 160, 420])
        group = self.chance.randrange(2)
        writer = self.chance.randrange(4)
        last = self.tables[writer, (self.lengths[writer] - 1) // 64] * 64
        self.write(group, ids(last + self.random.choice(64, 3, replace=False)))
        parts = [[0, 0, 1], [2, 3, 3, 2]] if self.chance.random() < 0.6 else [[0, 1, 2, 3]]
        for part in parts:
            self.fetch("plan", group, self.rows_of(part, top_k, group))
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


def campaign(seed, step_count, evict="lru"):
    world = Campaign(seed, evict)
    for _ in range(step_count):
        world.one_step()
    return world.seen


def assert_every_case_was_met(seen):
    expected = {
        *("plan place_count", "plan late_ticket", "plan evicted_count", "plan hit_count"),
        *("warm evicted_count", "block moved", "block held"),
        *(("claim_new", True), ("claim_new", False)),
        *(("claim_each", done_count) for done_count in range(3)),
    }
    assert not expected - {name for name, count in seen.items() if count}, "never met"
