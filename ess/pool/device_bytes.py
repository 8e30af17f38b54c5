"""Bytes that the pools of one worker take of a device, by purpose, from numbers alone.

For plans, before anything is allocated. A device's allocator rounds each array up by itself; these
are the arrays' own bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.pool.capacity import even_chunks, page_count
from ess.pool.lru.arena import AGE_MAX
from ess.pool.lru.cuda_audit import FINDINGS
from ess.pool.lru.cuda_new_rows import call_words, new_row_sizes
from ess.pool.lru.cuda_shape import KINDS, REPORT, ResolveShape
from ess.pool.lru.cuda_workspaces import workspace_sizes
from ess.units import PAGE_ROWS, div_ceil

INT: Final = 4
LONG: Final = 8
RANK: Final = 2
SCALE: Final = 8
HOLDERS: Final = 8
SEALS: Final = 3
"""The most steps that are sealed and not yet stored: one is being sealed, the step before may be
neither learned nor landed, and the first is being learned. Each has its own lists and keys."""
PARTS_MAX: Final = 4
"""The most parts of a step's queries that a group may have resolved at a time."""
RING: Final = 3
"""The most copies of a step whose claims are kept at a time."""
LANDINGS: Final = 8
"""The most landings under way at a time, and the most rows of each."""
LANDING_ROWS: Final = 4096
LATENT_MAX: Final = 512
"""With twice as many no shape of attention for 64 heads or more fits into shared memory."""
GROWTH: Final = 4
"""A group may own this many times its even share of the slots."""
QUERY_NUMBERS: Final = 6
BEHIND: Final = 4
"""The most copies of the counted numbers on their way to the host; it reads the latest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Pages and chunks of a worker, and its largest step."""

    layout: ModelLayout
    chunks: int
    index_pages: int
    sequence_max: int
    length_max: int
    query_max: int
    is_scored: bool = False

    @property
    def slot_total(self) -> int:
        return self.chunks * self.layout.group_layers_max * PAGE_ROWS

    @property
    def blocks(self) -> list[int]:
        """The most blocks of 64 slots that each group may own."""
        counts = zip(chunks_max(self.layout, self.chunks), self.layout.groups, strict=True)
        return [chunks * (self.layout.group_layers_max // len(group)) for chunks, group in counts]


def check_on_device(layout: ModelLayout, device: str) -> None:
    """Refuses a layout that no device serves yet."""
    latents = [row.latent_dim for row in (layout.row, *layout.rows) if row.form != "f32"]
    lacks = {
        "has rows of several sizes": bool(layout.rows),
        "has rows of several tokens": layout.row_tokens > 1 or layout.has_states,
        "has layers that attend to a window": any(layout.windows),
        "selects units of several rows": layout.select_unit > 1,
        f"has rows of more than {LATENT_MAX} latent values": max(latents, default=0) > LATENT_MAX,
    }
    for what, lacking in lacks.items():
        if lacking:
            raise BadInput(f"{layout.name!r} {what}: not on {device!r} yet")


def stage_shape(
    part: ModelLayout, *, index_pages: int, sequence_max: int, length_max: int
) -> PoolShape:
    """The pools of a pipeline's stage that has this part of the layout. Chunks of prompts read
    their rows on the host, or in a copy that lasts as long as the chunk: a stage keeps no working
    set and runs no steps. It has a slot for each sequence and no more."""
    return PoolShape(
        layout=part,
        chunks=div_ceil(sequence_max, PAGE_ROWS) * part.group_count,
        index_pages=index_pages,
        sequence_max=sequence_max,
        length_max=length_max,
        query_max=1,
    )


def chunks_max(layout: ModelLayout, chunks: int) -> list[int]:
    """The most chunks that each group may ever own: kernels are launched for as many."""
    others = layout.group_count - 1
    return [min(GROWTH * count, chunks - others) for count in even_chunks(layout, chunks)]


def pool_bytes(shape: PoolShape) -> Mapping[str, int]:
    """Bytes by purpose; `slots`, `index keys` and `row maps` are sized by settings."""
    layout = shape.layout
    row_bytes = INT + (RANK if shape.is_scored else 0)
    return {
        "slots": shape.chunks * layout.chunk_bytes,
        "index keys": shape.index_pages * layout.key_page_bytes,
        "row maps": layout.group_count * shape.index_pages * PAGE_ROWS * row_bytes,
        "slot maps": _slot_maps(shape),
        "page tables": _tables(shape),
        "residency": _residency(shape),
        "stores": SEALS * _seal(shape),
    }


def locked_bytes(shape: PoolShape, *, host_pages: int) -> int:
    """Host bytes with locked pages: all rows and keys, and the lists that follow each step."""
    behind = BEHIND * _counted(shape) * LONG + SEALS * (
        _sealed_keys(shape) + shape.sequence_max * INT
    )
    return host_pages * shape.layout.host_page_bytes + behind


def _slot_maps(shape: PoolShape) -> int:
    """Bytes per slot: its row, its last use, its ticket, its dirty mark; and per-group tables."""
    groups, blocks = shape.layout.group_count, shape.blocks
    ages = groups * (AGE_MAX + 1) * LONG
    return shape.slot_total * (3 * INT + 1) + ages + (sum(blocks) + groups) * INT


def _tables(shape: PoolShape) -> int:
    pages = shape.sequence_max * page_count(shape.length_max)
    numbers = pages + shape.sequence_max + shape.index_pages + QUERY_NUMBERS * shape.query_max
    return (numbers + shape.layout.group_count + 1) * INT


def _residency(shape: PoolShape) -> int:
    """Bytes of the workspaces and reports of all calls: steps, new rows, landings, leaving rows."""
    layout, groups, query_max = shape.layout, shape.layout.group_count, shape.query_max
    most = max(shape.blocks)
    single = ResolveShape.of(query_max=1, top_k=1, block_max=most)
    smallest = ResolveShape.of(query_max=1, top_k=1, block_max=1)
    width = min(LANDING_ROWS, shape.index_pages * PAGE_ROWS)
    landing = ResolveShape.of(query_max=1, top_k=width, block_max=most)
    select = ResolveShape.of(query_max=query_max, top_k=layout.top_k, block_max=most)
    new_rows = ResolveShape.of_new_rows(query_max, most)
    counts = (
        _numbers(workspace_sizes(select, group_count=groups, part_max=PARTS_MAX + 1, ring=RING)),
        _numbers(workspace_sizes(single, group_count=groups, ring=1)),
        _numbers(workspace_sizes(smallest, group_count=groups, ring=1)),
        LANDINGS * _numbers(workspace_sizes(landing, ring=1)),
        _numbers(new_row_sizes(new_rows, groups)),
        call_words(groups),
        PARTS_MAX * query_max * (4 * layout.top_k + 3) + query_max * layout.top_k,
        FINDINGS,
    )
    scores = query_max * SCALE + shape.index_pages * HOLDERS if shape.is_scored else 0
    return sum(counts) * INT + _counted(shape) * LONG + scores


def _counted(shape: PoolShape) -> int:
    """How many numbers the host reads after each step."""
    return len(KINDS) * shape.layout.group_count * (len(REPORT) + 1) + 2 * shape.sequence_max


def _seal(shape: PoolShape) -> int:
    layout, count = shape.layout, shape.query_max
    lists = (layout.group_count + 2 * layout.layer_total) * count * INT
    return lists + _sealed_keys(shape)


def _sealed_keys(shape: PoolShape) -> int:
    return shape.layout.key_layer_count * shape.query_max * shape.layout.key_bytes


def _numbers(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values())
