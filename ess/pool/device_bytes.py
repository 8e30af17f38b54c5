"""What the pools of one worker take of a device, from numbers alone: bytes by what they are for.

For plans, before anything is allocated. A device's allocator rounds each array up by itself; these
are the arrays' own bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ess.layout import ModelLayout
from ess.pool.capacity import even_chunks, page_count
from ess.pool.lru.arena import AGE_MAX
from ess.pool.lru.cuda_audit import FINDINGS
from ess.pool.lru.cuda_new_rows import call_words, new_row_sizes
from ess.pool.lru.cuda_shape import KINDS, REPORT, ResolveShape
from ess.pool.lru.cuda_workspaces import workspace_sizes
from ess.units import PAGE_ROWS

INT: Final = 4
LONG: Final = 8
SEALS: Final = 3
"""Steps that may be sealed and not stored at a time: one is being sealed, the step before may be
neither learned nor landed, and the first is being learned. Each has lists and keys of its own."""
RING: Final = 3
"""Copies of a step whose claims are kept at a time."""
LANDINGS: Final = 8
"""Landings under way at a time, and rows of each at most."""
LANDING_ROWS: Final = 4096
GROWTH: Final = 4
"""Times its even share that a group may own of the slots."""
QUERY_NUMBERS: Final = 6
BEHIND: Final = 4
"""Copies of the counted numbers that may be under way to the host; the latest is read meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Pages and chunks that sizes pay for, and the largest step."""

    layout: ModelLayout
    chunks: int
    index_pages: int
    sequence_max: int
    length_max: int
    query_max: int
    part_max: int = 4

    @property
    def slot_total(self) -> int:
        return self.chunks * self.layout.group_layers_max * PAGE_ROWS

    @property
    def blocks(self) -> list[int]:
        """Blocks of 64 slots that each group may own at most."""
        counts = zip(chunks_max(self.layout, self.chunks), self.layout.groups, strict=True)
        return [chunks * (self.layout.group_layers_max // len(group)) for chunks, group in counts]


def chunks_max(layout: ModelLayout, chunks: int) -> list[int]:
    """The most chunks that each group may ever own: kernels are launched for so many."""
    others = layout.group_count - 1
    return [min(GROWTH * count, chunks - others) for count in even_chunks(layout, chunks)]


def pool_bytes(shape: PoolShape) -> Mapping[str, int]:
    """`slots`, `index keys` and `row maps` are what the settings of these sizes pay for."""
    layout = shape.layout
    return {
        "slots": shape.chunks * layout.chunk_bytes,
        "index keys": shape.index_pages * layout.key_page_bytes,
        "row maps": layout.group_count * shape.index_pages * PAGE_ROWS * INT,
        "slot maps": _slot_maps(shape),
        "page tables": _tables(shape),
        "residency": _residency(shape),
        "stores": SEALS * _seal(shape),
    }


def locked_bytes(shape: PoolShape, *, host_pages: int) -> int:
    """Memory of the host with pages locked: all rows and keys, and what comes behind steps."""
    behind = BEHIND * _counted(shape) * LONG + SEALS * (
        _sealed_keys(shape) + shape.sequence_max * INT
    )
    return host_pages * shape.layout.host_page_bytes + behind


def _slot_maps(shape: PoolShape) -> int:
    """Of each slot its row, when it was used last, its ticket, and whether it is dirty."""
    groups, blocks = shape.layout.group_count, shape.blocks
    ages = groups * (AGE_MAX + 1) * LONG
    return shape.slot_total * (3 * INT + 1) + ages + (sum(blocks) + groups) * INT


def _tables(shape: PoolShape) -> int:
    pages = shape.sequence_max * page_count(shape.length_max)
    numbers = pages + shape.sequence_max + shape.index_pages + QUERY_NUMBERS * shape.query_max
    return (numbers + shape.layout.group_count + 1) * INT


def _residency(shape: PoolShape) -> int:
    """What calls work in and answer with, of steps, of new rows, of landings and of leaving."""
    layout, groups, query_max = shape.layout, shape.layout.group_count, shape.query_max
    most = max(shape.blocks)
    single = ResolveShape.of(query_max=1, top_k=1, block_max=most)
    smallest = ResolveShape.of(query_max=1, top_k=1, block_max=1)
    width = min(LANDING_ROWS, shape.index_pages * PAGE_ROWS)
    landing = ResolveShape.of(query_max=1, top_k=width, block_max=most)
    select = ResolveShape.of(query_max=query_max, top_k=layout.top_k, block_max=most)
    new_rows = ResolveShape.of_new_rows(query_max, most)
    counts = (
        _numbers(
            workspace_sizes(select, group_count=groups, part_max=shape.part_max + 1, ring=RING)
        ),
        _numbers(workspace_sizes(single, group_count=groups, ring=1)),
        _numbers(workspace_sizes(smallest, group_count=groups, ring=1)),
        LANDINGS * _numbers(workspace_sizes(landing, ring=1)),
        _numbers(new_row_sizes(new_rows, groups)),
        call_words(groups),
        shape.part_max * query_max * (4 * layout.top_k + 3) + query_max * layout.top_k,
        FINDINGS,
    )
    return sum(counts) * INT + _counted(shape) * LONG


def _counted(shape: PoolShape) -> int:
    """Numbers that the host hears of behind each step."""
    return len(KINDS) * shape.layout.group_count * (len(REPORT) + 1) + 2 * shape.sequence_max


def _seal(shape: PoolShape) -> int:
    layout, count = shape.layout, shape.query_max
    lists = (layout.group_count + 2 * layout.layer_total) * count * INT
    return lists + _sealed_keys(shape)


def _sealed_keys(shape: PoolShape) -> int:
    key_bytes = 0 if shape.layout.index is None else shape.layout.index.key_bytes
    return shape.layout.key_layer_count * shape.query_max * key_bytes


def _numbers(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values())
