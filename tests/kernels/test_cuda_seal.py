"""The end of a step by one kernel, on the emulated device: what a dozen calls of torch would do."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ess.kernels.cuda.program import source_text
from ess.pool.lru.cuda_seal import SEAL, SealRecord
from ess.pool.lru.cuda_shape import REPORT, slot_program
from ess.units import PAGE_ROWS
from tests.support.emulate import (
    DeviceFault,
    build,
    emulated,
    launches_of,
    lent,
    needs_compiler,
    source_of,
)

pytestmark = needs_compiler

THREADS = 64
PROGRAM = slot_program(SEAL, THREADS)
KERNELS = {"ess_seal": "Seal"}
WIDTH = len(REPORT) + 1
SELECT, WRITE, LEAVE = range(3)
CHANGED = ("slot_of", "row_of", "dirty", "lengths", "totals")
MADE = ("kept", "sources", "targets", "told", "keys")
TWINS = {
    "counts that are added, but not at once": (
        "atomicAdd(&left[group * number_stride], u64(leaves));",
        "left[group * number_stride] += u64(leaves);",
        "race on totals",
    ),
    "rows that are read before they are written": (
        "stays = __syncthreads_count(keeps);\n        const i32 leaves = __syncthreads_count(",
        "stays = keeps;\n        const i32 leaves = i32(",
        "race on shared memory|which no thread has written",
    ),
    "keys of one row more": (
        "i < here * width;",
        "i < (here + 1) * width;",
        "outside of every array|which no thread has written|race on keys",
    ),
}


@pytest.fixture(scope="module")
def seal(folder):
    return emulated(PROGRAM, KERNELS, folder)["ess_seal"]


class World:
    """Arrays of a step's end. `query_counts` of each sequence, layers of each group; room for more
    new rows than there are, and slots and rows at random places."""

    def __init__(self, seed, groups, query_counts, *, values=8, scales=4, room=3):
        self.random = np.random.default_rng(seed)
        self.groups, self.query_counts = groups, query_counts
        self.count, self.pages, self.host_pages = sum(query_counts), 5 + sum(query_counts) // 32, 40
        self.stride, self.layers_each = self.count + room, 1 + 2 * seed
        self.values, self.scales = values, scales
        self._maps()
        self._step(len(groups), sum(map(len, groups)))

    def ints(self, *shape, value=-77):
        return np.full(shape, value, np.int32)

    def _maps(self):
        self.row_count, group_total = self.pages * PAGE_ROWS, len(self.groups)
        slots = group_total * self.stride * 2
        self.slot_of = self.ints(group_total, self.row_count, value=-1)
        self.row_of, self.dirty = self.ints(slots, value=-1), np.zeros(slots, np.uint8)
        rows = self.random.permutation(self.row_count)[: self.count].astype(np.int32)
        places = self.random.permutation(slots)[: group_total * self.stride].astype(np.int32)
        self.new_slots = places.reshape(group_total, self.stride)
        self.new_slots[:, self.count :] = -1
        for group, claimed in enumerate(self.new_slots[:, : self.count]):
            self.slot_of[group, rows], self.row_of[claimed], self.dirty[claimed] = claimed, rows, 1
        self.rows = np.append(rows, self.ints(self.stride - self.count, value=-1))
        self.host_page_of = self.random.permutation(self.host_pages)[: self.pages].astype(np.int32)

    def _step(self, group_total, layer_total):
        random, counts = self.random, np.array(self.query_counts)
        self.sequence_of = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
        self.offsets = np.concatenate([np.arange(count) for count in counts]).astype(np.int32)
        self.accepted = random.integers(0, counts + 1).astype(np.int32)
        self.lines = random.permutation(len(counts) + 2)[: len(counts)].astype(np.int32)
        self.lengths = random.integers(0, 99, len(counts) + 2).astype(np.int32)
        self.first_layer = np.cumsum([0, *map(len, self.groups)]).astype(np.int32)
        width = self.values + self.scales
        pages = (group_total if width else 0, self.pages, PAGE_ROWS * width)
        self.key_pages = random.integers(0, 256, pages, dtype=np.uint8)
        self.totals = random.integers(0, 1 << 40, (4, group_total, WIDTH))
        self.selects = random.integers(0, 99, (3, group_total, len(REPORT))).astype(np.int32)
        self.writes = random.integers(0, 99, (group_total, len(REPORT))).astype(np.int32)
        self.kept = self.ints(group_total * self.stride)
        self.sources, self.targets = (self.ints(layer_total * self.stride) for _ in range(2))
        self.told = self.ints(len(counts) + 1)
        self.keys = np.full((pages[0] * self.stride, max(1, width)), 77, np.uint8)

    def arrays(self):
        return {name: each for name, each in vars(self).items() if isinstance(each, np.ndarray)}

    def record(self, claimed, kept):
        totals = self.totals
        record = SealRecord().give(
            **{name: each for name, each in self.arrays().items() if name != "totals"},
            selected=totals[SELECT],
            written=totals[WRITE],
            left=totals[LEAVE, :, REPORT.index("left") :],
            stored=totals[LEAVE, :, WIDTH - 1 :],
            row_id_count=self.row_count,
            slot_stride=self.stride,
            host_row_count=self.host_pages * PAGE_ROWS,
            layers_each=self.layers_each,
            page_count=self.pages,
            key_words=(self.values + self.scales) // 4,
            value_words=self.values // 4,
            group_total=len(self.groups),
            select_count=len(self.selects),
            number_stride=WIDTH,
        )
        step = {"count": self.count, "sequence_count": len(self.accepted)}
        return record, record.give_step(**step, groups=claimed, stored=kept)

    def run(self, seal, folder, claimed, kept, *, seed=1):
        record, blocks = self.record(claimed, kept)
        with lent(folder, self.arrays(), unwritten=MADE):
            seal(record, blocks=blocks, threads=THREADS, seed=seed)


def sealed_by_torch(world, claimed, kept):
    """What the kernel takes the place of, in calls of torch."""
    there = {name: torch.from_numpy(each.copy()) for name, each in world.arrays().items()}
    w, count = SimpleNamespace(**there), world.count
    keep = w.accepted.index_select(0, w.sequence_of) > w.offsets
    rows = w.rows[:count]
    for group in claimed:
        stays = keep if group in kept else torch.zeros_like(keep)
        slots = w.new_slots[group, :count]
        w.slot_of[group].index_copy_(0, rows.long(), torch.where(stays, slots, -1))
        w.row_of.index_copy_(0, slots.long(), torch.where(stays, rows, -1))
        w.dirty.index_copy_(0, slots.long(), stays.to(torch.uint8))
        w.totals[LEAVE, group, REPORT.index("left")] += (~stays).sum()
        w.totals[LEAVE, group, WIDTH - 1] += stays.sum()
        w.totals[SELECT, group, :-1] += w.selects[:, group].sum(dim=0)
        w.totals[WRITE, group, :-1] += w.writes[group]
    w.lengths.index_add_(0, w.lines, w.accepted)
    w.told[: len(w.accepted)] = w.accepted
    if kept:
        lists_by_torch(world, w, keep, rows, kept)
        for group in claimed:
            keys_by_torch(world, w, rows, group)
    return w


def lists_by_torch(world, w, keep, rows, kept):
    count = world.count
    slots = torch.where(keep, w.new_slots[kept.start : kept.stop, :count], -1)
    w.kept[: slots.numel()] = slots.reshape(-1)
    pages = torch.div(rows, PAGE_ROWS, rounding_mode="floor")
    host_rows = w.host_page_of.index_select(0, pages) * PAGE_ROWS + rows % PAGE_ROWS
    layers = [(g, m, layer) for g in kept for m, layer in enumerate(world.groups[g])]
    for at, (group, member, layer) in enumerate(layers):
        mine = slice(at * count, (at + 1) * count)
        sources = w.new_slots[group, :count] + member * PAGE_ROWS
        targets = layer % world.layers_each * world.host_pages * PAGE_ROWS + host_rows
        w.sources[mine] = torch.where(keep, sources, -1)
        w.targets[mine] = torch.where(keep, targets, -1)


def keys_by_torch(world, w, rows, group):
    if not len(w.key_pages):
        return
    split = PAGE_ROWS * world.values
    values = w.key_pages[group, :, :split].view(world.pages, PAGE_ROWS, world.values)
    scales = w.key_pages[group, :, split:].view(world.pages, PAGE_ROWS, world.scales)
    page, offset = (
        torch.div(rows, PAGE_ROWS, rounding_mode="floor").long(),
        (rows % PAGE_ROWS).long(),
    )
    keys = torch.cat((values[page, offset], scales[page, offset]), dim=1)
    w.keys[group * world.count : (group + 1) * world.count] = keys


PAIRS, SHARED = ((0, 1), (2,), (3,)), ((0,), (1, 2, 3, 4), (5, 6), (7,))
STEPS = {
    "one sequence": (PAIRS, [1], range(3), range(3)),
    "four of MTP 1": (PAIRS, [1] * 4, range(2), range(2)),
    "MTP 2": (SHARED, [2, 2, 2], range(4), range(4)),
    "MTP 4, more rows than a block takes": (SHARED, [4] * 33, range(4), range(4)),
    "ragged": (SHARED, [3, 1, 70, 2], range(1, 4), range(1, 4)),
    "a group that has not all of its layers": (SHARED, [2, 3], range(4), range(1, 3)),
    "nothing is stored": (PAIRS, [2, 3], range(3), range(0)),
    "nothing was claimed": (PAIRS, [2, 3], range(0), range(0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_all_that_a_seal_changes_and_lists(name, seal, folder):
    groups, counts, claimed, kept = STEPS[name]
    for seed in range(3):
        world = World(seed, groups, counts, scales=[4, 0][seed % 2])
        expected = sealed_by_torch(world, claimed, kept)
        world.run(seal, folder, claimed, kept, seed=seed + 1)
        for array in (*CHANGED, *MADE):
            np.testing.assert_array_equal(vars(world)[array], vars(expected)[array], array)


def test_host_rows_of_which_31_bits_name_no_more_than_one_layer(seal, folder):
    world = World(0, SHARED, [2])
    world.host_pages = (1 << 31) // PAGE_ROWS
    world.host_page_of[:] = world.host_pages - 1 - np.arange(world.pages)
    world.accepted[:] = world.query_counts
    world.run(seal, folder, range(4), range(4))
    pages, offsets = world.rows[:2] // PAGE_ROWS, world.rows[:2] % PAGE_ROWS
    named = world.host_page_of[pages].astype(np.int64) * PAGE_ROWS + offsets
    np.testing.assert_array_equal(world.targets[: 8 * 2].reshape(8, 2), [named] * 8)


@pytest.mark.parametrize("accepted", ["none", "all"])
def test_nothing_or_everything_is_kept(accepted, seal, folder):
    world = World(4, SHARED, [2, 4, 1])
    world.accepted[:] = 0 if accepted == "none" else world.query_counts
    expected = sealed_by_torch(world, range(4), range(4))
    world.run(seal, folder, range(4), range(4))
    for array in (*CHANGED, *MADE):
        np.testing.assert_array_equal(vars(world)[array], vars(expected)[array], array)
    assert (world.kept[: 4 * 7] >= 0).all() == (accepted == "all")


def test_a_row_without_a_slot_is_left_out(seal, folder):
    """No slot is free for it: the report says so, and no row uses the missing slot."""
    world = World(5, SHARED, [2, 4, 1])
    world.accepted[:] = world.query_counts
    lost = world.new_slots[2, 3].copy()
    world.new_slots[2, 3] = world.slot_of[2, world.rows[3]] = -1
    before = world.row_of[lost], world.dirty[lost]
    world.run(seal, folder, range(4), range(4))
    assert (world.row_of[lost], world.dirty[lost]) == before
    assert world.slot_of[2, world.rows[3]] == -1
    lines = world.sources[: 8 * 7].reshape(8, 7), world.targets[: 8 * 7].reshape(8, 7)
    for line in lines:
        assert (line[5:7, 3] == -1).all()
        assert (np.delete(line, 3, axis=1) >= 0).all()


def test_a_model_without_index_keys(seal, folder):
    world = World(6, PAIRS, [2, 1], values=0, scales=0)
    expected = sealed_by_torch(world, range(3), range(3))
    world.run(seal, folder, range(3), range(3))
    for array in CHANGED:
        np.testing.assert_array_equal(vars(world)[array], vars(expected)[array], array)
    assert (world.keys == 77).all()


@pytest.mark.parametrize("name", TWINS)
def test_the_watch_sees_a_twin_that_is_wrong(name, folder):
    right, wrong, sentence = TWINS[name]
    text, _ = source_of(PROGRAM, KERNELS)
    kernel = source_text(SEAL)
    assert kernel.count(right) == 1
    text = text.replace(f'#include "{SEAL}"', kernel.replace(right, wrong))
    library = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    twin = launches_of(build(text, PROGRAM, library), KERNELS)["ess_seal"]
    for seed in range(3):
        with pytest.raises(DeviceFault, match=sentence):
            World(seed, SHARED, [4] * 33).run(twin, folder, range(4), range(4), seed=seed + 1)
