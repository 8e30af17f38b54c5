"""What the two doors do alike, in a process that has a device or pretends to: see test_doors.py."""

from __future__ import annotations

import pytest

from tests.door_device.doors import LAYOUT, STYLES, Doors

MAIN = range(LAYOUT.layer_count)


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
