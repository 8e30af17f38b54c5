"""Eviction by score: the residency kernels, on an emulated device, against their specification."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ess.pool.lru import specification
from ess.pool.lru.arena import Arena
from ess.pool.lru.cuda_records import observe_record
from tests.kernels.test_cuda_resolve import aged_arena, both
from tests.support.device_residency import DeviceCampaign
from tests.support.emulate import needs_compiler
from tests.support.emulated_residency import Emulated
from tests.support.twins import ids

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def scored(folder):
    """In phases: the doors of devices are tested with all of a call in one launch."""
    return Emulated(folder, is_together=False, is_scored=True)


def test_scored_rows_give_way_as_the_specification_says(scored):
    """Ranks, victims, and who forgets what, bit for bit; some logits are not numbers."""
    scored.reset()
    world = DeviceCampaign(6, scored, "score")
    for _ in range(10):
        world.one_step()
    assert world.seen["plan evicted_count"] > 3


def test_ranks_follow_more_queries_than_a_warp_has_lanes(scored):
    """All of them see one page, and each third of them two others. Some logits are not numbers, and
    of one query none that it selects."""
    random = np.random.default_rng(3)
    scored.reset()
    lines, line_of = ids([[1, 2, 3], [1, 4, 5], [1, 6, 7]]), ids(np.arange(70) % 3)
    length = ids(random.integers(60, 193, 70))
    selection = ids([random.choice(60, 8, replace=False) for _ in length])
    logits = random.normal(size=(70, 192)).astype(np.float32)
    for first, value in enumerate((np.nan, np.inf, -np.inf, -0.0)):
        for query in range(first, 70, 9):
            logits[query, selection[query, :2]] = value
    logits[7, selection[7]] = np.nan
    arenas = [Arena.alone(row_count=512, slot_count=64, evict="score") for _ in range(2)]
    lookup = types.SimpleNamespace(lines=lines)
    given = {"selection": selection, "line_of": line_of, "length": length, "logits": logits}
    for operations, arena in zip((specification, scored), arenas, strict=True):
        operations.observe(arena, lookup, **given)
    np.testing.assert_array_equal(*(arena.eviction.rank_of for arena in arenas))


def test_pages_of_many_queries_follow_them_in_order(scored):
    """More queries than a warp has lanes: pages of one, of neighbours, of the first and the last,
    and of all."""
    scored.reset()
    tables = np.arange(40 * 4, dtype=np.int32).reshape(40, 4)
    tables[:, 0] = 0
    tables[39, 1], tables[6, 2], tables[38, 1] = tables[0, 1], tables[5, 2], tables[2, 1]
    made = [Arena.alone(row_count=160 * 64, slot_count=64, evict="score") for _ in range(2)]
    random = np.random.default_rng(3)
    logits = random.normal(size=(40, 256)).astype(np.float32)
    selection, length = ids([[0, 3, 9]] * 40), ids(random.integers(10, 257, 40))
    given = types.SimpleNamespace(lines=tables), selection, ids(np.arange(40)), length
    for arena, operations in zip(made, (specification, scored), strict=True):
        operations.observe(arena, *given, logits=logits)
    np.testing.assert_array_equal(made[1].eviction.rank_of, made[0].eviction.rank_of)


@pytest.mark.parametrize(
    "wrong",
    [{"length": 63}, {"width": 64}, {"page": -1}, {"page": 8}],
    ids=["selected beyond", "few logits", "no page", "no such page"],
)
def test_scores_of_what_cannot_be_are_reported(scored, wrong):
    scored.reset()
    case = {"length": 70, "width": 128, "page": 3} | wrong
    arena = Arena.alone(row_count=512, slot_count=64, evict="score")
    given = {"selection": ids([[0, 63]]), "line_of": ids([0]), "length": ids([case["length"]])}
    given["logits"] = np.zeros((1, case["width"]), np.float32)
    with pytest.raises(AssertionError):
        scored.observe(arena, types.SimpleNamespace(lines=ids([[0, case["page"]]])), **given)
    assert scored.report["faults"] == 1


@pytest.mark.parametrize("wanted", [60, 1000, 3000])
def test_the_lowest_ranks_of_several_tiles(scored, wanted):
    """Free slots, and ranks of which only the upper 8 bits count: the lowest and the highest."""
    scored.reset()
    ranks = np.array([0, 255, 256, 33_000, 33_001, 65_279, 65_280, 65_535], np.uint16)

    def ranked():
        arena = aged_arena(2048, evict="score")
        arena.eviction.rank_of[:] = np.random.default_rng(4).choice(ranks, arena.slot_of.size)
        return arena

    rows = np.arange(wanted, dtype=np.int32)[None]
    claims = both(scored, ranked, rows, step=1000, ticket=20)
    assert (claims.evicted_count > 0) == (wanted > 200), "60 find free slots, more do not"


@pytest.mark.parametrize(
    ("queries", "tokens", "blocks"),
    [(1, 64, 1), (1, 1 << 20, 1024), (2, 1 << 17, 128), (128, 1 << 17, 16), (4, 1 << 20, 512)],
)
def test_the_pages_of_few_queries_are_spread(queries, tokens, blocks):
    arena = types.SimpleNamespace(slot_of=np.zeros(64), rank_of=None)
    record = observe_record(
        arena=arena,
        workspace={"now": ids([0]), "report": ids([0])},
        positions=np.zeros((queries, 8), np.int32),
        logits=np.broadcast_to(np.float32(0), (queries, tokens)),
        scales=np.zeros(2 * queries, np.float32),
        holders=np.zeros(2, np.int32),
        page_table=np.broadcast_to(np.int32(0), (1, tokens // 64)),
        table_row=ids([0]),
        length=ids([0]),
    )
    assert record.blocks_each == blocks
