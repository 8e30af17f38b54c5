"""The pools of a stage: its part of the layout, with as many pages as every other stage has.

A stage needs no sparse pool, as chunks read their prompts' rows on the host, or a copy of them that
lasts as long as the chunk: it has one slot for each sequence and no more.
"""

from __future__ import annotations

from typing import Final

from ess.door import Offload
from ess.layout import ModelLayout
from ess.pool.capacity import whole_count
from ess.pool.disk.tier import DiskTier
from ess.units import PAGE_ROWS, div_ceil

QUERY_MAX: Final = 1
"""Of a step: a stage runs none."""


def slot_chunks(part: ModelLayout, sequence_max: int) -> int:
    """Chunks of slots that a stage with this part of the layout has."""
    return div_ceil(sequence_max, PAGE_ROWS) * part.group_count


def stage_offload(
    layout: ModelLayout,
    layers: tuple[int, int],
    *,
    host_bytes: int,
    index_bytes: int,
    length_max: int,
    sequence_max: int,
    poison: bool = False,
    shared: bool = False,
    device: str = "cpu",
    disk: DiskTier | None = None,
) -> Offload:
    """`layout` is the whole model's, and the memory is that of all stages together."""
    part = layout.part(*layers)
    host_pages = whole_count("host_bytes", host_bytes, layout.host_page_bytes)
    index_pages = whole_count("index_bytes", index_bytes, layout.index_page_bytes)
    return Offload.create(
        part,
        slot_bytes=slot_chunks(part, sequence_max) * part.chunk_bytes,
        host_bytes=host_pages * part.host_page_bytes,
        index_bytes=index_pages * part.index_page_bytes,
        length_max=length_max,
        sequence_max=sequence_max,
        query_max=QUERY_MAX,
        slot_floor=1,
        poison=poison,
        shared=shared,
        device=device,
        disk=disk,
    )
