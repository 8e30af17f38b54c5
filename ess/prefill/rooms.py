"""The pools of a stage: its part of the layout, with as many pages as every other stage has."""

from __future__ import annotations

from ess.door import Offload
from ess.layout import ModelLayout
from ess.pool.capacity import whole_count
from ess.pool.device_bytes import stage_shape
from ess.pool.disk.tier import DiskTier


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
    shape = stage_shape(
        part, index_pages=index_pages, sequence_max=sequence_max, length_max=length_max
    )
    return Offload.create(
        part,
        slot_bytes=shape.chunks * part.chunk_bytes,
        host_bytes=host_pages * part.host_page_bytes,
        index_bytes=index_pages * part.index_page_bytes,
        length_max=length_max,
        sequence_max=sequence_max,
        query_max=shape.query_max,
        slot_floor=1,
        poison=poison,
        shared=shared,
        device=device,
        disk=disk,
    )
