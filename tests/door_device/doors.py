"""The door of the host and the door of a device, driven with the same calls and compared.

Only for a process with a real or pretended device. After each call both sides must have returned
the same, and `compare` checks all state that they keep: maps, ages, slots, rows and keys on the
host.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from ess.door import Offload, Sequence
from ess.errors import PoolFull
from ess.flashtrans import InlineLane
from tests.handoff.layout import LAYOUT

LEADERS = [group[0] for group in LAYOUT.groups]
FIELDS = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")
MAPS = ("slot_of", "row_of", "last_use", "dirty")
COUNTS = (
    *("hit_count", "miss_count", "place_count", "evicted_count", "fetched_bytes", "stored_bytes"),
    *("used_slot_count", "slot_count", "step_count", "free_host_page_count"),
    "free_index_page_count",
)


class Doors:
    """`chunks` of slots for all groups together, `pages` on the host."""

    def __init__(self, *, chunks, pages=16, seed=0, **sizes):
        given = {"sequence_max": 4, "length_max": 320, "query_max": 12} | sizes
        given |= {
            "slot_bytes": chunks * LAYOUT.chunk_bytes,
            "host_bytes": pages * LAYOUT.host_page_bytes,
            "poison": True,
        }
        self.host = Offload.create(LAYOUT, lane=InlineLane(), **given)
        self.device = Offload.create(LAYOUT, device="cuda:0", **given)
        self.random = np.random.default_rng(seed)
        self.sequences = []
        self.sealed = []

    def both(self, call, *pairs):
        """The same on both sides; their answers, or the same refusal."""
        answers = []
        for door, *given in zip((self.host, self.device), *pairs, strict=True):
            try:
                answers.append(call(door, *given))
            except PoolFull as full:
                answers.append((full.limiter, full.needed))
        if isinstance(answers[0], tuple):
            assert answers[0] == answers[1]
        return answers

    # ---- sequences

    def open(self, tokens, **options):
        """With rows of all positions but the last imported."""
        opened = self.both(lambda door: door.open(tokens, **options))
        if isinstance(opened[0], tuple):
            return None
        start = opened[0].cached_count
        assert opened[1].cached_count == start
        count = len(tokens) - 1 - start
        if count > 0:
            for layer in range(LAYOUT.layer_total):
                self.bring(opened, layer, start, self.bytes(count, LAYOUT.row_bytes), "rows")
            for layer in LEADERS:
                self.bring(opened, layer, start, self.bytes(count, 12), "keys")
        self.sequences.append(tuple(opened))
        return tuple(opened)

    def bring(self, opened, layer, start, content, what):
        for sequence in opened:
            getattr(sequence, f"import_{what}")(layer, start, content)

    def bytes(self, count, width):
        return self.random.integers(0, 255, (count, width), dtype=np.uint8)

    def close(self, pair):
        self.sequences.remove(pair)
        for sequence in pair:
            sequence.close()

    def each(self, pair, verb, *, says=True, **options):
        """A verb of a sequence. What it `says` is the same, where the device can know it."""
        said = self.both(lambda _, sequence: getattr(sequence, verb)(**options), pair)
        assert not says or isinstance(said[0], Sequence) or said[0] == said[1]
        return said

    def fork(self, pair):
        made = self.each(pair, "fork")
        if not isinstance(made[0], tuple):
            self.sequences.append(tuple(made))

    def drain(self):
        self.both(lambda door: door.drain())

    # ---- steps

    def begin(self, pairs, counts):
        """The steps of both sides, or None where there is no room."""
        steps = self.both(
            lambda door, mine: door.begin(mine, query_counts=counts), list(zip(*pairs, strict=True))
        )
        if isinstance(steps[0], tuple):
            return None
        for name in ("row_ids", "query_line", "query_start", "query_offset", "query_stop"):
            same(getattr(steps[0], name), getattr(steps[1], name), name)
        same(steps[0].page_table, steps[1].page_table, "page_table")
        return steps

    def append(self, steps, layer, queries=None):
        count = steps[0].query_count if queries is None else len(queries)
        rows = self.bytes(count, LAYOUT.row_bytes)
        keys = self.bytes(count, 12) if layer in LEADERS else None
        steps[0].append(layer, rows, keys=keys, queries=queries)
        steps[1].append(layer, there(rows), keys=there(keys), queries=queries)

    def resolve(self, steps, layer, selection, **options):
        """Both answers, which name the same entries."""
        if selection is not None and self.host.wants_scores:
            self.observe(steps, layer, selection, options.get("queries"))
        made = [
            step.resolve(layer, None if selection is None else given(selection), **options)
            for step, given in zip(steps, (torch.from_numpy, there), strict=True)
        ]
        for name in FIELDS:
            same(getattr(made[0], name), getattr(made[1], name), f"{name} of layer {layer}")
        return made

    def observe(self, steps, layer, selection, queries):
        """Logits of as many positions as the longest context has, and some more."""
        logits = self.random.normal(size=(len(selection), 320)).astype(np.float32)
        chosen = np.take_along_axis(logits, np.maximum(selection, 0), 1)
        np.put_along_axis(logits, np.maximum(selection, 0), chosen + np.float32(2), 1)
        for step, given in zip(steps, (torch.from_numpy, there), strict=True):
            step.observe(layer, given(selection), given(logits), queries=queries)

    def wait(self, layer, made):
        """Both have the same bytes where they say that rows are."""
        for resolution in made:
            resolution.wait()
        slots = made[0].slots.numpy()
        self.same_slots(layer, slots[slots >= 0])
        placed = -2 - slots[slots < -1]
        rows = [door.memory(layer).host.numpy()[placed] for door in (self.host, self.device)]
        np.testing.assert_array_equal(*rows)

    def same_slots(self, layer, slots):
        here, away = (door.memory(layer).slots for door in (self.host, self.device))
        np.testing.assert_array_equal(away.cpu().numpy()[slots], here.numpy()[slots])

    def locate(self, steps, layer, selection, queries):
        made = [
            step.locate(layer, given(selection), queries=queries)
            for step, given in zip(steps, (torch.from_numpy, there), strict=True)
        ]
        same(*made, f"located of layer {layer}")
        chosen = there(np.array(queries, np.int32))
        same(made[0], steps[1].locate(layer, there(selection), queries=chosen), "by a tensor")

    def locate_all(self, steps, layer, selection):
        """On the device every row must be resident: who asks has been told so."""
        made = [
            step.locate_all(layer, given(selection))
            for step, given in zip(steps, (torch.from_numpy, there), strict=True)
        ]
        same(*made, f"slots of layer {layer}")

    def codes(self, steps, layer, selection):
        """What reads the truth names the same rows on both sides."""
        made = [
            step.host_codes(layer, given(selection))
            for step, given in zip(steps, (torch.from_numpy, there), strict=True)
        ]
        same(*made, f"host codes of layer {layer}")

    def seal(self, steps, accepted):
        steps[0].seal(accepted=accepted)
        steps[1].seal(accepted=there(np.array(accepted, np.int32)))
        self.sealed.append((steps, accepted))

    def learn(self):
        steps, accepted = self.sealed.pop(0)
        texts = [self.random.integers(0, 1 << 20, count).tolist() for count in accepted]
        for place, sequence in enumerate(steps[0].sequences):
            known = sequence.tokens[sequence.length : sequence.length + accepted[place]]
            texts[place][: len(known)] = known
        for step in steps:
            step.learn(accepted=accepted, tokens=texts)

    def select(self, steps, layer, queries=None):
        """Positions that each query may select, ascending; some are near all queries' hearts."""
        step = steps[0]
        lengths = np.asarray(step.lengths(layer))
        lengths = lengths if queries is None else lengths[queries.start : queries.stop]
        lines = []
        for length in lengths.tolist():
            count = min(length, int(self.random.integers(0, LAYOUT.top_k + 1)))
            near = np.unique(self.random.geometric(0.03, 64) % max(1, length))
            chosen = near[:count] if self.random.random() < 0.6 else self.random.permutation(length)
            chosen = np.sort(chosen[:count]).astype(np.int32)
            lines.append(np.pad(chosen, (0, LAYOUT.top_k - len(chosen)), constant_values=-1))
        return np.array(lines, np.int32)

    # ---- all that they keep

    def compare(self):
        """Nothing is under way on either side."""
        self.drain()
        here, away = (door._pools for door in (self.host, self.device))
        for group in range(LAYOUT.group_count):
            mine, other = here.sparse._arenas[group], away.sparse.arenas[group]
            for name in MAPS:
                same(getattr(mine, name), getattr(other, name), f"{name} of group {group}")
            same(mine.hit_age, other.hit_age, f"hit_age of group {group}")
            if self.host.wants_scores:
                ranks = mine.eviction.rank_of.view(np.int16)
                same(ranks, other.rank_of, f"rank_of of group {group}")
        used, slots = np.flatnonzero(here.sparse._row_of >= 0), here.sparse.slots_of(0)
        np.testing.assert_array_equal(away.sparse.slab.cpu().numpy()[used], slots[used])
        for name in ("rows", "stored", "keyed"):
            same(getattr(here.latent, name), getattr(away.latent, name), f"host {name}")
        same(here.latent.keys.pages, away.latent.keys.pages, "host keys")
        self.same_keys(here, away)
        same(here.tables.lengths, away.tables.maps.lengths, "lengths")
        for pair in self.sequences:
            assert pair[0].length == pair[1].length
            assert pair[0].tokens == pair[1].tokens
        here, away = (door.stats() for door in (self.host, self.device))
        for name in COUNTS:
            same(getattr(here, name), getattr(away, name), name)

    def same_keys(self, here, away):
        """Of the pages that sequences have."""
        pages = np.flatnonzero(here.index.host_page_of >= 0)
        same(here.index.keys.pages[:, pages], away.index.keys.pages.cpu()[:, pages], "active keys")

    def audit(self):
        self.compare()
        self.both(lambda door: door.check())
        for layer in range(LAYOUT.layer_total):
            assert self.device.verify(layer) == []

    def close_all(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.host)
            stack.enter_context(self.device)


def there(array):
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to("cuda:0")


def same(here, away, what):
    arrays = [
        each.cpu().numpy() if isinstance(each, torch.Tensor) else each for each in (here, away)
    ]
    np.testing.assert_array_equal(arrays[1], arrays[0], what)


def whole(doors, steps, layers):
    for layer in layers:
        doors.append(steps, layer)
        selection = doors.select(steps, layer) if layer in LEADERS else None
        doors.wait(layer, doors.resolve(steps, layer, selection, waits=True))
        if selection is not None:
            doors.locate(steps, layer, selection[:1], [0])
            doors.codes(steps, layer, selection)


def halves(doors, steps, layers):
    """DBA: both halves are resolved before either is waited for."""
    parts = parts_of(steps)
    for layer in layers:
        doors.append(steps, layer)
        made = [resolve_part(doors, steps, layer, part, None) for part in parts]
        for each in made:
            doors.wait(layer, each)


def turns(doors, steps, layers):
    """TBO: a half of the batch resolves while the other's fetch is under way, a layer apart."""
    parts, waiting = parts_of(steps), []
    for layer in layers:
        for at, part in enumerate(parts):
            doors.append(steps, layer, part)
            made = resolve_part(doors, steps, layer, part, 2 * at)
            waiting.append((layer, made))
            if len(waiting) > 1:
                doors.wait(*waiting.pop(0))
    for each in waiting:
        doors.wait(*each)


def resolve_part(doors, steps, layer, part, workspace):
    selection = doors.select(steps, layer, part) if layer in LEADERS else None
    return doors.resolve(steps, layer, selection, queries=part, workspace=workspace)


def parts_of(steps):
    count = steps[0].query_count
    middle = max(1, count // 2)
    return [range(middle), range(middle, count)] if count > 1 else [range(count)]


STYLES = {"whole": whole, "halves": halves, "turns": turns}
