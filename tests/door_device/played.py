"""What the two doors do alike, in a process that has a device or pretends to: see test_doors.py."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest

from ess.kernels.cuda.streams import CudaEvent
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


@pytest.mark.parametrize("style", STYLES)
def test_a_tight_arena(made, style):
    """Rows give way, and where none can, others are read in place."""
    doors = made(chunks=3, seed=2)
    pairs = [doors.open(list(range(n, 3 * n)), promise="some") for n in (60, 90)]
    for _turn in range(5):
        counts = doors.random.integers(1, 5, 2).tolist()
        accepted = [int(doors.random.integers(0, count + 1)) for count in counts]
        step(doors, pairs, counts, style, accepted)
        doors.compare()
    assert doors.host.stats().evicted_count.sum() > 0


def test_the_smallest_arena_reads_rows_in_place(made):
    doors = made(chunks=3, seed=3, query_max=40)
    pairs = [doors.open(list(range(200)))]
    for _turn in range(3):
        step(doors, pairs, [38], "whole", [int(doors.random.integers(0, 39))])
        doors.compare()
    assert doors.host.stats().place_count.sum() > 0


@pytest.mark.parametrize("seed", [4, 5])
def test_sequences_come_and_go(made, seed):
    """Prefixes are found again, sequences are preempted, forked, warmed and filled."""
    doors = made(chunks=6, pages=14, seed=seed)
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
