"""Rows of several sizes: a slab for each, no byte kept for nothing, the same answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ess.door import Offload
from ess.door.handoff import geometry
from ess.door.residency import budgets
from ess.errors import BadInput
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.models.registry import read_config as parse_config
from ess.models.weights.expected.dry_run import read_config
from ess.pool.capacity import INDEX_PAGES, even_slabs, least_chunks, needs, request_bytes
from ess.pool.device_bytes import check_on_device
from ess.pool.latent import LatentPool
from ess.pool.sparse import SparsePool
from ess.transfer.messages import PieceKind
from ess.transfer.runs import Runs
from tests.model import grid
from tests.support import checkpoints


def opaque(size: int) -> RowCodec:
    return RowCodec(form="opaque", opaque_bytes=size)


MIXED = ModelLayout(
    name="mixed",
    layer_count=7,
    groups=((0,), (1, 2), (3,), (4,), (5, 6)),
    row=opaque(40),
    rows=tuple(map(opaque, (24, 40, 24, 12, 24))),
    index=IndexCodec(key_dim=8, head_count=1),
    top_k=32,
    slot_floor=256,
    windows=(0, 0, 32, 0, 0),
)
PUBLISHED = [
    parse_config(read_config(name)).layout(name=name) for name in ("dots3-note", "mistral-large-4")
]
TEXT = checkpoints.TINY_MISTRAL4["text_config"]
STILL = {**checkpoints.TINY_MISTRAL4, "text_config": {**TEXT, "indexer_types": ["full"] * 5}}


def test_a_token_takes_what_its_layers_need() -> None:
    assert MIXED.token_row_bytes == 24 + 2 * 40 + 24 + 12 + 2 * 24
    assert MIXED.host_page_bytes == 64 * (MIXED.token_row_bytes + 4 * 12)
    assert (MIXED.slot_bytes, MIXED.window_slot_bytes) == (MIXED.token_row_bytes - 24, 24)
    assert MIXED.row_runs == (range(1), range(1, 3), range(3, 4), range(4, 5), range(5, 7))
    assert [MIXED.row_of(layer).row_bytes for layer in range(7)] == [24, 40, 40, 24, 12, 24, 24]


def test_published_families_keep_no_zeros() -> None:
    dots, mistral = ([row.row_bytes for row in layout.rows] for layout in PUBLISHED)
    assert (dots.count(656), dots.count(1184)) == (13, 33)
    assert (mistral.count(656), mistral.count(528)) == (54, 18)


def test_layers_that_share_slots_have_rows_of_one_size() -> None:
    kinds = ["full", "full", "shared", "shared", "full"]
    mixed = {**STILL, "text_config": {**STILL["text_config"], "indexer_types": kinds}}
    assert parse_config(STILL).layout().row_sizes == (260, 132)
    assert parse_config(mixed).layout().row_sizes == (260,)


@pytest.mark.slow
@pytest.mark.parametrize("arena", ["smallest", "tight", "ample"])
def test_layers_that_turn_nothing_answer_alike(arena: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grid.RANDOM, "still", STILL)
    way = {"checkpoint": "still", "mode": "da", "tbo": "on", "sbo": "off", "depth": "1"}
    way |= {"arena": arena, "warm": "on", "mtp": "1", "evict": "lru"}
    assert len(grid.checkpoint("still").config.layout(row="f32", index="f32").row_sizes) == 2
    assert grid.differences(way) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": (opaque(24),)}, "rows has 1 codecs for 5 groups"),
        ({"row": opaque(44)}, "row has 44 bytes, the widest of rows 40"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        replace(MIXED, **changes)


@pytest.mark.parametrize("layout", [MIXED, *PUBLISHED])
@pytest.mark.parametrize("more", [0, 1, 5, 100, 777])
def test_slabs_share_no_byte_and_no_number(layout: ModelLayout, more: int) -> None:
    """And as many requests find their slots in each of them, but for a chunk."""
    memory = (least_chunks(layout) + more) * layout.chunk_bytes
    slabs = even_slabs(layout, memory)
    assert [slab.row_bytes for slab in slabs] == list(layout.row_sizes)
    ends = [(slab.first * slab.row_bytes, slab.byte_end, slab.first, slab.stop) for slab in slabs]
    for (_, end, _, stop), (begin, _, first, _) in pairwise(ends):
        assert end <= begin < end + 64 * layout.row_bytes
        assert stop <= first
    assert ends[-1][1] <= memory < ends[-1][1] + 2 * layout.chunk_bytes
    assert all(not slab.first % 64 and min(slab.counts) > 0 for slab in slabs)
    sparse = SparsePool(layout, np.zeros(memory, np.uint8), row_id_count=64, poison=True)
    sparse.check()
    served = [
        sparse.slot_count(g) // (layout.window_floor if layout.window_of(g) else layout.slot_floor)
        for g in range(layout.group_count)
    ]
    lost = 2 * layout.group_count * layout.chunk_bytes
    each = needs(1, slots=layout.slot_floor, window_floor=layout.window_floor)
    assert min(served) >= (memory - lost) // request_bytes(layout, {**each, INDEX_PAGES: 0})


def test_memory_for_too_few_chunks_has_no_slabs() -> None:
    enough = least_chunks(MIXED) * MIXED.chunk_bytes
    assert even_slabs(MIXED, enough)
    assert not even_slabs(MIXED, enough - MIXED.chunk_bytes)


def test_slots_of_slabs_are_each_their_own() -> None:
    """Every slot of every layer is written; what is read is what was written there."""
    memory = np.zeros(40 * MIXED.chunk_bytes, np.uint8)
    sparse = SparsePool(MIXED, memory, row_id_count=64)
    sides = {
        (group, member): sparse.slots_of(group, member)
        for group, layers in enumerate(MIXED.groups)
        for member in range(len(layers))
    }
    for at, ((group, _), side) in enumerate(sides.items()):
        side[sparse._arenas[group].slots] = at + 1
    for at, ((group, _), side) in enumerate(sides.items()):
        assert (side[sparse._arenas[group].slots] == at + 1).all()


def test_chunks_stay_among_rows_of_their_size() -> None:
    sparse = SparsePool(MIXED, np.zeros(60 * MIXED.chunk_bytes, np.uint8), row_id_count=64)
    sparse.begin_step()
    before = sparse.slot_count(2)
    assert sparse.move_chunks(0, 2)
    assert sparse.slot_count(2) > before
    sparse.check()
    with pytest.raises(AssertionError, match="rows of 0 and 1 differ"):
        sparse.move_chunks(0, 1)


def test_a_small_slab_has_pieces_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window beside requests that keep all their rows in slots: a piece of the others' slab is
    more than it has."""
    monkeypatch.setattr(budgets, "PIECES", 8)
    monkeypatch.setattr(budgets, "PIECES_EACH", 1)
    layout = replace(MIXED, windows=(0, 0, 0, 32, 0), slot_floor=8192)
    with Offload.create(
        layout,
        slot_bytes=200 * layout.chunk_bytes,
        host_bytes=16 * layout.host_page_bytes,
        length_max=8192,
        query_max=8,
    ) as door:
        chunks = door._pools.sparse.chunks
        assert [sum(slab.counts) for slab in chunks.slabs] == [90, 182, 5]
        door.begin([door.open([1, 2], length_max=64)], query_counts=[1]).abandon()
        assert door.rebalance() == 0
        door.check()


def bytes_at(runs: Runs) -> set[tuple[int, int, int]]:
    return {tuple(run) for run in runs.tolist()}


@pytest.mark.parametrize("cut", [1, 3, 4, 5])
def test_units_of_a_part_go_where_the_whole_has_them(cut: int) -> None:
    pages, pool = np.array([0, 5, 2], np.int64), 9
    parts = MIXED.part(0, cut), MIXED.part(cut, 7)
    assert sum(part.host_page_bytes for part in parts) == MIXED.host_page_bytes
    for kind in (PieceKind.ROWS, PieceKind.INDEX_KEYS):
        count = [p.layer_total if kind is PieceKind.ROWS else p.key_layer_count for p in parts]
        theirs = [
            geometry.unit_runs(part, kind, range(n), pages, pool, is_whole=True)
            for part, n in zip(parts, count, strict=True)
        ]
        whole = geometry.unit_runs(MIXED, kind, range(sum(count)), pages, pool)
        assert np.array_equal(np.concatenate(theirs), whole)
        assert len(bytes_at(whole)) == sum(count) * 3


def test_units_lie_in_the_pool_where_its_pages_do() -> None:
    """Each page of each layer is filled through its run, and read as rows and keys."""
    latent = LatentPool(MIXED, np.zeros(5 * MIXED.host_page_bytes, np.uint8))
    regions = {region.number: region.memory for region in geometry.pool_regions(latent)}
    pages = np.arange(5, dtype=np.int64)
    for layer in range(7):
        runs = geometry.unit_runs(MIXED, PieceKind.ROWS, range(layer, layer + 1), pages, 5)
        for page, (region, begin, size) in enumerate(runs.tolist()):
            regions[region][begin : begin + size] = 10 * layer + page + 1
    for layer, rows in enumerate(latent.layers):
        assert (rows.reshape(5, -1) == 10 * layer + pages[:, None] + 1).all()


def test_a_step_stores_rows_of_each_size_and_finds_them_again() -> None:
    """Through slots that give way, a preemption and a cached prefix; verify sees a changed byte."""
    rng, length = np.random.default_rng(3), 200
    rows = [rng.integers(0, 255, (length, size), np.uint8) for size in MIXED.layer_bytes(range(7))]
    keys = rng.integers(0, 255, (length, 12), np.uint8)
    with Offload.create(
        MIXED,
        slot_bytes=(least_chunks(MIXED) + 6) * MIXED.chunk_bytes,
        host_bytes=16 * MIXED.host_page_bytes,
        length_max=512,
        slot_floor=24,
        poison=True,
    ) as door:
        line = door.open(range(length), length_max=512)
        for layer in range(7):
            line.import_rows(layer, 0, rows[layer][:150])
        for group in MIXED.key_groups:
            line.import_keys(MIXED.groups[group][0], 0, keys[:150])
        with pytest.raises(BadInput, match="rows"):
            line.import_rows(1, 150, rows[0][150:])
        for first in range(150, length, 10):
            _step(door, line, rows, keys, range(first, first + 10))
        line.preempt()
        line.resume()
        again = door.open(range(length), length_max=512)
        assert again.cached_count == 192
        for layer in range(7):
            host = again.host_rows(0, 192).numpy()
            assert np.array_equal(door.owner.pools.latent.layers[layer][host], rows[layer][:192])
        door.drain()
        door.check()
        assert not any(door.verify(layer) for layer in range(7))


def _step(
    door: Offload, line: object, rows: list[np.ndarray], keys: np.ndarray, new: range
) -> None:
    queries = slice(new.start, new.stop)
    step = door.begin([line], query_counts=[len(new)], starts=[new.start])
    for group, layers in enumerate(MIXED.groups):
        keyed = group in MIXED.key_groups
        step.append(layers[0], rows[layers[0]][queries], keys=keys[queries] if keyed else None)
        chosen = np.sort(np.random.default_rng(new.start + group).permutation(new.start)[:32])
        selection = np.tile(chosen.astype(np.int32), (len(new), 1))
        for member, layer in enumerate(layers):
            if member:
                step.append(layer, rows[layer][queries])
            where = step.resolve(layer, None if member else selection)
            where.wait()
            memory = door.memory(layer)
            slots = where.slots.numpy()
            picked = np.where(
                (slots >= 0)[..., None],
                memory.slots.numpy()[np.maximum(slots, 0)],
                memory.host.numpy()[np.maximum(-2 - slots, 0)],
            )
            assert np.array_equal(picked[0], rows[layer][chosen]), f"layer {layer}"
    step.commit(accepted=[len(new)], tokens=[list(new)])
    door.check()


def test_rows_that_no_program_of_attention_holds_are_refused():
    """The first step on a device ended there, when all weights had been read."""
    layout = ModelLayout(name="wide", layer_count=1, groups=((0,),))
    for latent, form in ((512, "fp8"), (1024, "f32")):
        row = RowCodec(form=form, latent_dim=latent)
        check_on_device(replace(layout, row=row), "cuda")
    with pytest.raises(BadInput, match="rows of more than 512 latent values: not on 'cuda' yet"):
        check_on_device(replace(layout, row=RowCodec(latent_dim=1024)), "cuda")
