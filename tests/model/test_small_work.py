"""What native code says of a step's tokens is what NumPy and torch say: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.door.steps import arrays
from ess.door.steps.arrays import HostArrays
from ess.kernels.cpu import native, records, step
from ess.models.layers import RotaryPositions
from ess.pool.index import PageTables
from ess.pool.lru import planner, specification
from ess.pool.lru.arena import Arena
from tests.support.built import needs_native
from tests.support.checkpoints import small
from tests.support.twins import Twins, ids

pytestmark = needs_native

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 31, 100, 1000])
def test_the_best_is_the_first_of_the_greatest(width):
    logits = torch.randn(40, width + 3, generator=torch.Generator().manual_seed(width))
    logits[:20] = logits[:20].round()
    logits[20:30] = logits[20:30].clamp(max=-0.0)
    lines = logits[:, 1 : 1 + width]
    first = np.argmax(lines.numpy(), axis=1)
    assert step.best(lines).tolist() == first.tolist()


@pytest.mark.parametrize("place", [0, 1, 15, 16, 19, 36])
def test_one_logit_that_is_no_number_spoils_its_line_alone(place):
    logits = torch.full((3, 37), -INF)
    logits[0, 36] = INF
    logits[1, place] = NAN
    assert step.best(logits).tolist() == [36, -1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 64, 129])
def test_embedded_rows_are_those_of_torch(dtype, width):
    table = torch.randn(50, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    table[3], table[4, 0] = INF, NAN
    for chosen in ([49], [0, 3, 4, 4, 17]):
        given = torch.tensor(chosen)
        made = step.embedded(table, given)
        assert made.view(torch.int32).equal(table[given].float().view(torch.int32))
    assert step.embedded(table, torch.tensor([3, 50])) is None
    assert step.embedded(table, torch.tensor([-1])) is None


@pytest.mark.parametrize("count", [1, 5])
def test_what_layers_in_one_call_read_is_what_ops_are_given(count):
    rng = np.random.default_rng(count)
    given, turns = tables(rng).lines, torch.randn(90, 2, 6)
    lines = rng.integers(0, 7, count).astype(np.int32)
    positions = rng.integers(0, 90, count).astype(np.int32)
    table = torch.full((count, given.shape[1]), -9, dtype=torch.int32)
    cos, sin = torch.full((2, count, 6), NAN)
    at = native.address
    opening = records.Opening(
        *(at(given), *given.shape, at(lines), table.data_ptr(), turns.data_ptr()),
        *(len(turns), 6, at(positions), cos.data_ptr(), sin.data_ptr(), count),
    )
    assert step.opened(opening) == step.Opened.ALL
    np.testing.assert_array_equal(table.numpy(), given[lines])
    assert cos.equal(turns[positions, 0])
    assert sin.equal(turns[positions, 1])
    positions[-1] = 90
    assert step.opened(opening) == step.Opened.TABLE
    lines[-1] = 7
    assert step.opened(opening) == step.Opened.ASTRAY


def tables(rng: np.random.Generator) -> PageTables:
    made = PageTables(sequence_max=7, page_max=5)
    for length in rng.integers(0, 4 * 64, 7).tolist():
        made.enter(rng.permutation(90)[:5].astype(np.int32), length)
    return made


NAMES = ("query_line", "query_offset", "query_start", "query_stop", "row_ids", "row_offset")


def test_places_are_those_of_numpy(monkeypatch):
    rng = np.random.default_rng(1)
    for _ in range(50):
        given = tables(rng)
        lines = rng.permutation(7)[: rng.integers(1, 8)].tolist()
        counts = rng.integers(1, 9, len(lines)).tolist()
        ours = HostArrays(given, lines, counts)
        with monkeypatch.context() as plain:
            plain.setattr(arrays.native, "available", lambda: False)
            theirs = HostArrays(given, lines, counts)
        for name in (*NAMES, "positions"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            assert mine.dtype == other.dtype == np.int32, name
            np.testing.assert_array_equal(mine, other, err_msg=name)


def test_a_line_or_a_page_that_is_not_there_has_no_places():
    given = tables(np.random.default_rng(2))
    given.set_length(3, 5 * 64 - 1)
    assert step.places(given.lines, given.lengths, [3], [1]) is not None
    assert step.places(given.lines, given.lengths, [3], [2]) is None
    for line in (-1, 7):
        assert step.places(given.lines, given.lengths, [line], [1]) is None
    given.give_back(4)
    assert step.places(given.lines, given.lengths, [0, 4], [1, 1]) is None


def test_angles_that_are_kept_are_those_that_are_computed():
    config = small("v32", layer_count=1).config
    kept, longer = (RotaryPositions(config, torch.device("cpu")) for _ in range(2))
    rng = np.random.default_rng(3)
    for most in (40, 3000, 40, 1 << 18):
        positions = torch.from_numpy(rng.integers(0, most, 37).astype(np.int32))
        angles, computed = kept.at(positions), longer._computed(positions)
        assert angles.cos.equal(computed.cos)
        assert angles.sin.equal(computed.sin)
        assert angles.positions is positions
    assert len(kept.kept) == 4096, "positions beyond what is kept are computed"


@pytest.mark.parametrize("evict", ["lru", "sieve", "score"])
def test_a_slot_that_was_left_is_found_again(evict):
    """A search for free slots begins where the last search ended, or at a slot that became free
    since."""
    twins = Twins((3, 2), evict)
    rng = np.random.default_rng(4)
    for _ in range(60):
        twins.step += 1
        group, rows = int(rng.integers(2)), rng.permutation(300).astype(np.int32)
        twins.write(group, rows[: rng.integers(1, 60)])
        twins.both("drop", group, rows[-rng.integers(1, 120) :])
    assert twins.seen["claim_new", True] > 20


def test_a_block_that_was_cleared_is_searched_again():
    arenas = [Arena.alone(row_count=256, slot_count=128) for _ in range(2)]
    for arena, operations in zip(arenas, (specification, planner), strict=True):
        out = ids(range(100))
        assert operations.claim_new(arena, ids(range(100)), step=300, out=out)
        operations.settle(arena, out)
        assert operations.clear_block(arena, 0, step=301)
        assert operations.claim_new(arena, ids([200, 201]), step=302, out=out[:2])
        assert out[:2].tolist() == [0, 1]
