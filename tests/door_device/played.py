"""What the two doors do alike, in a process that has a device or pretends to: see test_doors.py."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ess.door.device.residency import knowledge
from ess.door.device.residency.landings import Landings
from ess.errors import BadState
from ess.kernels.cuda import driver
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.sparse import FIRST_STEP
from ess.units import PAGE_ROWS
from tests.door_device.doors import LAYOUT, LEADERS, STYLES, Doors, there


@pytest.fixture
def made():
    """Makes doors, and closes them."""
    doors = []

    def make(**sizes):
        doors.append(Doors(**sizes))
        return doors[-1]

    yield make
    for each in doors:
        each.close_all()


def step(doors, pairs, counts, style, accepted, *, late=False):
    steps = doors.begin(pairs, counts)
    if steps is None:
        return
    STYLES[style](doors, steps, range(LAYOUT.layer_total))
    doors.seal(steps, accepted)
    while len(doors.sealed) > late:
        doors.learn()


def test_an_audit_before_the_first_step(made):
    doors = made(chunks=12)
    doors.each(doors.open(list(range(130))), "warm", windows=windows(doors, 129))
    doors.device.check()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("late", [False, True])
def test_steps_of_a_batch(made, style, late):
    doors = made(chunks=12, seed=1)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 33, 130)]
    for _turn in range(4):
        counts = doors.random.integers(1, 4, 3).tolist()
        accepted = [int(doors.random.integers(0, count + 1)) for count in counts]
        step(doors, pairs, counts, style, accepted, late=late)
        if not late:
            doors.compare()
    while doors.sealed:
        doors.learn()
    doors.audit()


@pytest.mark.parametrize(("style", "evict"), [*product(STYLES, ["lru"]), ("halves", "score")])
def test_a_tight_arena(made, style, evict):
    """Rows give way, and where none can, others are read in place."""
    doors = made(chunks=3, seed=2, evict=evict)
    pairs = [doors.open(list(range(n, 3 * n)), promise="some") for n in (60, 90)]
    for _turn in range(8):
        counts = doors.random.integers(1, 5, 2).tolist()
        accepted = [int(doors.random.integers(0, count + 1)) for count in counts]
        step(doors, pairs, counts, style, accepted)
        doors.compare()
    assert doors.host.stats().evicted_count.sum() > 0


def test_names_of_steps_begin_anew(made, monkeypatch):
    """Long before 32 bits run out, on both sides at once; here after some steps."""
    for module in ("ess.pool.sparse", "ess.door.device.memory.arenas"):
        monkeypatch.setattr(f"{module}.NOW_MAX", FIRST_STEP + 3)
    doors = made(chunks=3, seed=2)
    pairs = [doors.open(list(range(n, 3 * n)), promise="some") for n in (60, 90)]
    for _turn in range(9):
        step(doors, pairs, [1, 2], "whole", [1, 2])
        doors.compare()
        assert doors.device._pools.sparse.now == doors.host._pools.sparse.now <= FIRST_STEP + 3
    assert doors.host._pools.sparse.step > FIRST_STEP + 6
    doors.audit()


def test_numbers_that_name_rows_of_three_layers_alone(made, monkeypatch):
    """As 31 bits do of a host with much memory: the kept rows of a step go there in parts."""
    for module in ("ess.flashtrans.mover", "ess.door.device.steps.sealing"):
        monkeypatch.setattr(f"{module}.INT32_ROWS_MAX", 3 * 16 * PAGE_ROWS)
    doors = made(chunks=12, pages=16, seed=22)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 33)]
    for counts in ([1, 2], [3, 3]):
        step(doors, pairs, counts, "whole", counts)
        doors.compare()
    doors.audit()


def test_the_smallest_arena_reads_rows_in_place(made):
    doors = made(chunks=3, seed=3, query_max=40)
    pairs = [doors.open(list(range(200)))]
    for _turn in range(3):
        step(doors, pairs, [38], "whole", [int(doors.random.integers(0, 39))])
        doors.compare()
    assert doors.host.stats().place_count.sum() > 0


@pytest.mark.parametrize(("seed", "evict"), [(4, "lru"), (5, "score")])
def test_sequences_come_and_go(made, seed, evict):
    """Prefixes are found again, sequences are preempted, forked, warmed and filled."""
    doors = made(chunks=6, pages=14, seed=seed, evict=evict)
    for _turn in range(14):
        live(doors)
        pairs = [pair for pair in doors.sequences if pair[0].state == "active"]
        if pairs:
            counts = doors.random.integers(1, 4, len(pairs)).tolist()
            accepted = [int(doors.random.integers(0, count + 1)) for count in counts]
            step(doors, pairs, counts, "halves", accepted)
        doors.compare()
    doors.audit()


def live(doors):
    """Something happens to a sequence."""
    random = doors.random
    if len(doors.sequences) < 3:
        first = int(random.integers(0, 2)) * 1000
        count = int(random.integers(2, 200))
        doors.open(list(range(first, first + count)), length_max=count + 60)
        return
    pair = doors.sequences[random.integers(len(doors.sequences))]
    active = pair[0].state == "active"
    verbs = ["preempt", "fork", "warm", "fill", "close"] if active else ["resume", "close"]
    match verbs[random.integers(len(verbs))]:
        case "close":
            doors.close(pair)
        case "fork":
            doors.fork(pair)
        case "warm":
            doors.each(pair, "warm", windows=windows(doors, pair[0].length))
        case "fill":
            most = [None, 5, 64][random.integers(3)]
            doors.each(pair, "fill", row_max=most, says=False)
        case verb:
            doors.each(pair, verb)
    doors.drain()


def windows(doors, length):
    shape = (LAYOUT.group_count, 3, 8)
    return doors.random.integers(-1, max(1, length), shape).astype("int32").clip(max=length - 1)


def test_what_is_resident_stays_known(made):
    """RESIDENT: the host knows that all rows are in slots, and positions become slots."""
    doors = made(chunks=24, seed=6)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 90)]
    for pair in pairs:
        doors.each(pair, "fill", says=False)
    doors.drain()
    known = []
    for _turn in range(5):
        steps = doors.begin(pairs, [2, 1])
        known.append(doors.device.all_resident([pair[1] for pair in pairs]))
        for layer in range(LAYOUT.layer_total):
            doors.append(steps, layer)
            if layer in LEADERS:
                doors.locate_all(steps, layer, doors.select(steps, layer))
        doors.seal(steps, [1, 1])
        doors.learn()
        doors.drain()
    assert known[0] is False
    assert known[-1] is True
    doors.device.check()


def test_few_looks_are_under_way(made, monkeypatch):
    """And none begins while some sequence is known to have rows without a slot."""
    monkeypatch.setattr(knowledge, "LOOKS_MAX", 1)
    doors = made(chunks=24, seed=26)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 90, 50)]
    mine, asked, knows = [pair[1] for pair in pairs], [], doors.device._side.knowledge
    numbers, look = [each.number for each in mine], knows._look
    monkeypatch.setattr(knows, "_look", lambda of: (asked.append(of.number), look(of)))
    for pair in pairs[1:]:
        doors.each(pair, "fill", says=False)
    doors.drain()

    def ask():
        for _turn in range(5):
            assert not any(doors.device.all_resident(mine) for _twice in range(2))
            doors.device._pools.counting.wait()

    ask()
    assert asked == numbers[:1]
    knows._looks[numbers[0]] = replace(knows._looks[numbers[0]], until_step=FIRST_STEP)
    ask()
    assert asked[1:] == [*numbers[1:], numbers[0]], "the oldest answer comes last"
    doors.each(pairs[0], "fill", says=False)
    doors.drain()
    knows.forget(mine[0])
    assert not doors.device.all_resident(mine)
    doors.device._pools.counting.wait()
    assert doors.device.all_resident(mine)
    doors.device.check()


def test_no_step_waits_for_the_device(made):
    """From `begin` to `learn`, and the next step begins before the last one is learned."""
    doors = made(chunks=3, seed=7)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 90)]
    accepted, sealed = there(np.array([1, 2], np.int32)), []
    for _turn in range(4):
        inputs = [drawn(doors, pairs, layer) for layer in range(LAYOUT.layer_total)]
        with no_waits():
            mine = doors.device.begin([pair[1] for pair in pairs], query_counts=[2, 2])
            for layer, (rows, keys, selection) in enumerate(inputs):
                mine.append(layer, rows, keys=keys)
                mine.resolve(layer, selection).wait()
            mine.seal(accepted=accepted)
            sealed.append(mine)
            if len(sealed) > 1:
                sealed.pop(0).learn(accepted=[1, 2])
    sealed.pop().learn(accepted=[1, 2])
    doors.device.check()


@pytest.fixture
def crowded(made, monkeypatch):
    """Landings have taken all slots of a group, and are not over, for all that the host sees."""
    doors = made(chunks=3, seed=18)
    mine = [doors.open(list(range(n, 2 * n)))[1] for n in (70, 90)]
    monkeypatch.setattr(Landings, "behind", lambda landings: landings._landed)
    for sequence in mine:
        sequence.fill()
    return doors, mine


def step_beside(doors, mine):
    """A step of the device, and what it has appended, by layer."""
    pairs = [(None, sequence) for sequence in mine]
    inputs = [drawn(doors, pairs, layer) for layer in range(LAYOUT.layer_total)]
    accepted = there(np.array([2, 2], np.int32))
    with no_waits():
        step = doors.device.begin(mine, query_counts=[2, 2])
        for layer, (rows, keys, selection) in enumerate(inputs):
            step.append(layer, rows, keys=keys)
            step.resolve(layer, selection).wait()
        step.seal(accepted=accepted)
    return step, [rows.cpu().numpy() for rows, _, _ in inputs]


def test_new_rows_find_slots_where_a_landing_takes_all(crowded, monkeypatch):
    """Compute waits for it, as its slots do not give way before; the host does not wait."""
    doors, mine = crowded
    starts = [sequence.length for sequence in mine]
    step, appended = step_beside(doors, mine)
    monkeypatch.undo()
    doors.device.drain()
    step.learn(accepted=[2, 2])
    for layer, rows in enumerate(appended):
        host = doors.device.memory(layer).host.numpy()
        kept = [s.holding.host_rows(start, 2) for s, start in zip(mine, starts, strict=True)]
        np.testing.assert_array_equal(host[np.concatenate(kept)], rows)
    doors.device.check()


def test_no_more_landings_are_waited_for_than_new_rows_need(crowded):
    """Both sequences fill groups of 64, 128 and 128 slots with 69 and 89 rows, in this order."""
    landings = crowded[0].device._side.landings
    tickets = [piece.ticket for piece in landings._under_way]
    held = [tickets.index(landings.hold_for(count)) for count in (1, 4, 39, 40)]
    assert held == [3, 3, 3, 5]


def test_new_rows_that_found_no_slot_are_refused(crowded, monkeypatch):
    doors, mine = crowded
    monkeypatch.setattr(Landings, "hold_for", lambda landings, _: landings._landed)
    step, _ = step_beside(doors, mine)
    monkeypatch.undo()
    doors.device.drain()
    with pytest.raises(BadState, match="4 new rows found no slot and are lost"):
        step.learn(accepted=[2, 2])


class Launches(TorchDispatchMode):
    """What torch computes or copies, by name; to look at a tensor another way is neither."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        if not any(each.alias_info and not each.alias_info.is_write for each in returned):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_ends_in_few_launches(made, monkeypatch):
    """A kernel for all groups, a copy of rows and one of keys; torch copies the counts alone."""
    doors, kernels = made(chunks=12, seed=11), []
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 33)]
    launch = driver.Kernel.launch
    for turn in range(2):
        steps = doors.begin(pairs, [4, 4])
        STYLES["whole"](doors, steps, range(LAYOUT.layer_total))
        accepted = there(np.array([turn, 3], np.int32))
        steps[0].seal(accepted=[turn, 3])
        with monkeypatch.context() as patch, Launches() as seen:
            patch.setattr(
                driver.Kernel,
                "launch",
                lambda kernel, *given, **options: (
                    kernels.append(kernel.entry),
                    launch(kernel, *given, **options),
                ),
            )
            steps[1].seal(accepted=accepted)
        doors.sealed.append((steps, [turn, 3]))
        doors.learn()
        assert kernels == ["ess_seal", "ess_move_rows", "ess_move_rows"]
        assert seen.names == ["copy_"]
        kernels.clear()
    doors.audit()


def drawn(doors, pairs, layer):
    """New rows, keys and a selection of four queries, on the device."""
    rows, keys = doors.bytes(4, LAYOUT.row_bytes), doors.bytes(4, 12)
    if layer not in LEADERS:
        return there(rows), None, None
    lengths = [len(pair[1].tokens) - 1 for pair in pairs for _ in range(2)]
    lines = [np.sort(doors.random.permutation(length)[: LAYOUT.top_k]) for length in lengths]
    return there(rows), there(keys), there(np.array(lines, np.int32))


@contextlib.contextmanager
def no_waits():
    """Neither torch nor we wait for the device in here."""
    pretence = sys.modules["tests.support.pretended"].PRETENCE

    def refuse(*_):
        raise AssertionError("the host waits for the device")

    wait, CudaEvent.wait, pretence.may_wait = CudaEvent.wait, refuse, False
    try:
        yield
    finally:
        CudaEvent.wait, pretence.may_wait = wait, True


def test_an_engine_writes_its_rows_itself(made):
    """Kernels put new rows where `places` says; pads behind them have no place."""
    doors = made(chunks=6, seed=8)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 33)]
    for counts in ([2, 1], [1, 3], [3, 3]):
        here = doors.host.begin([pair[0] for pair in pairs], query_counts=counts)
        away = doors.device.begin([pair[1] for pair in pairs], query_counts=counts, room=8)
        steps = Padded(here, away)
        for layer in range(LAYOUT.layer_total):
            steps.write(doors, layer)
            steps.resolve(doors, layer)
        doors.seal((here, away), [1, 1])
        doors.learn()
        doors.compare()
    doors.audit()


class Padded:
    """A step of the host beside one of the device that has pads."""

    def __init__(self, here, away):
        self.here, self.away = here, away
        self.count, self.room = here.query_count, away.query_count

    def write(self, doors, layer):
        rows, keys = doors.bytes(self.count, LAYOUT.row_bytes), doors.bytes(self.count, 12)
        has_keys = layer in LEADERS
        self.here.append(layer, rows, keys=keys if has_keys else None)
        places = self.away.places(layer)
        assert (places[self.count :] == -1).all()
        doors.device.memory(layer).slots[places[: self.count].long()] = there(rows)
        if has_keys:
            self.write_keys(doors.device.memory(layer).key_pages, there(keys))
        self.away.wrote(layer, keys=has_keys)

    def write_keys(self, pages, keys):
        rows = self.away.row_ids[: self.count].long()
        values = pages[:, : 64 * 8].view(-1, 64, 8)
        values[rows // 64, rows % 64] = keys[:, :8]
        scales = pages[:, 64 * 8 :].view(-1, 64, 4)
        scales[rows // 64, rows % 64] = keys[:, 8:]

    def resolve(self, doors, layer):
        selection, padded = None, None
        if layer in LEADERS:
            selection = doors.select((self.here, self.away), layer)
            padded = np.pad(selection, ((0, self.room - self.count), (0, 0)), constant_values=-1)
        here, away = self.here.resolve(layer, selection), self.away.resolve(layer, there(padded))
        away.wait()
        assert (away.slots[self.count :] == -1).all()
        np.testing.assert_array_equal(away.slots[: self.count].cpu().numpy(), here.wait().slots)


def test_a_slot_that_differs_from_its_host_is_named(made):
    doors = made(chunks=12, seed=10)
    doors.each(doors.open(list(range(70))), "fill", says=False)
    doors.drain()
    assert doors.device.verify(2) == []
    sparse = doors.device._pools.sparse
    slots, row_of = sparse.slots(LAYOUT.group_of(2)), sparse.row_of.cpu().numpy()
    named = slots[row_of[slots] >= 0][[0, 3]]
    memory, spoilt = doors.device.memory(2).slots, there(named).long()
    memory[spoilt] = 255 - memory[spoilt]
    differing = [(int(slot), int(row_of[slot])) for slot in named]
    assert doors.device.verify(2) == differing
    some = doors.device.compare(2, most=1).read()
    assert (some.count, some.listed) == (2, differing[:1])


def test_a_graph_is_replayed_for_other_steps(made):
    """What one step has queued is captured, and done again for later steps' rows and selections."""
    doors = made(chunks=3, seed=9)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 90)]
    layers, graph = Inputs(doors), torch.cuda.CUDAGraph()
    recording, answers = None, None
    for turn in range(5):
        here = doors.host.begin([pair[0] for pair in pairs], query_counts=[2, 2])
        away = doors.device.begin([pair[1] for pair in pairs], query_counts=[2, 2])
        layers.draw(doors, here)
        if turn < 2:
            answers = layers.run(away)
        elif recording is None:
            with torch.cuda.graph(graph):
                answers = layers.run(away)
                recording = away.record()
            graph.replay()
        else:
            away.replay(recording)
            graph.replay()
        for layer, slots in layers.expected.items():
            np.testing.assert_array_equal(answers[layer].cpu().numpy(), slots, f"turn {turn}")
        doors.seal((here, away), [1, 2])
        doors.learn()
        doors.compare()
    doors.audit()


class Inputs:
    """New rows, keys and selections of four queries, in memory that stays where it is."""

    def __init__(self, doors):
        make = lambda *shape: torch.zeros(shape, dtype=torch.uint8, device="cuda:0")  # noqa: E731
        layers = range(LAYOUT.layer_total)
        self.rows = {layer: make(4, LAYOUT.row_bytes) for layer in layers}
        self.keys = {layer: make(4, 12) for layer in LEADERS}
        self.selections = {
            layer: torch.zeros((4, LAYOUT.top_k), dtype=torch.int32, device="cuda:0")
            for layer in LEADERS
        }
        self.out = {
            layer: torch.zeros((4, LAYOUT.top_k), dtype=torch.int32, device="cuda:0")
            for layer in layers
        }

    def draw(self, doors, here):
        """The host's step runs with what the device's will find."""
        self.expected = {}
        for layer, rows in self.rows.items():
            drawn, keys = doors.bytes(4, LAYOUT.row_bytes), doors.bytes(4, 12)
            rows.copy_(there(drawn))
            leads = layer in LEADERS
            here.append(layer, drawn, keys=keys if leads else None)
            selection = doors.select((here,), layer) if leads else None
            if leads:
                self.keys[layer].copy_(there(keys))
                self.selections[layer].copy_(there(selection))
            self.expected[layer] = here.resolve(layer, selection).wait().slots.numpy().copy()

    def run(self, away):
        for layer, rows in self.rows.items():
            away.append(layer, rows, keys=self.keys.get(layer))
            where = away.resolve(layer, self.selections.get(layer))
            self.out[layer].copy_(where.wait().slots)
        return self.out
