"""The memory of a worker's pools, as the processes of a team read and write it.

One process owns the pools: it takes and frees pages, marks rows as stored and publishes them. The
others map the memory that the pools lie in (`SharedPools` says where it is); every call names its
pages. Nothing here counts pages or keeps state between calls.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from struct import Struct
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ess.array_types import Bytes, PageIds
from ess.door.checks import as_array
from ess.door.memory.pools import HostPools, Pools
from ess.door.sequences.sequence import key_layer
from ess.door.steps.placement import LayerMemory
from ess.errors import BadInput, Unavailable
from ess.flashtrans.rows import scatter_rows
from ess.kernels.memory import map_memory_file
from ess.layout import ModelLayout
from ess.pool.keys import KeyPages
from ess.pool.latent import laid_out, split
from ess.units import PAGE_ROWS

_SHARED: Final = Struct("<7Q")


@dataclass(frozen=True, slots=True)
class SharedPools:
    """Where the memory of a worker's pools is, for processes of its user on its machine."""

    pid: int
    host_fd: int
    host_pages: int
    host_page_bytes: int
    index_fd: int
    index_pages: int
    key_page_bytes: int

    @classmethod
    def of(cls, pools: Pools) -> SharedPools:
        pools = _on_host(pools)
        host_fd, index_fd = pools.latent.fd, pools.index.fd
        if host_fd is None or index_fd is None:
            raise BadInput("these pools are not in shared memory: see Offload.create(shared=True)")
        layout = pools.layout
        return cls(
            os.getpid(),
            *(host_fd, pools.latent.pages.page_count, layout.host_page_bytes),
            *(index_fd, pools.index.pages.page_count, layout.key_page_bytes),
        )

    def pack(self) -> bytes:
        return _SHARED.pack(*astuple(self))

    @classmethod
    def unpack(cls, content: bytes) -> SharedPools:
        if len(content) != _SHARED.size:
            raise BadInput(
                f"shared pools are described in {_SHARED.size} bytes, not {len(content)}"
            )
        return cls(*_SHARED.unpack(content))


@dataclass(frozen=True, slots=True, eq=False)
class MappedPools:
    """`rows` and `keys` as the latent pool has them, `active_keys` as the index pool."""

    layout: ModelLayout
    rows: tuple[Bytes, ...]
    keys: KeyPages
    active_keys: KeyPages

    @classmethod
    def of(cls, pools: Pools) -> MappedPools:
        """For the owner itself: nothing is mapped a second time."""
        pools = _on_host(pools)
        return cls(pools.layout, pools.latent.layers, pools.latent.keys, pools.index.keys)

    @classmethod
    def map(cls, layout: ModelLayout, shared: SharedPools) -> MappedPools:
        theirs = (shared.host_page_bytes, shared.key_page_bytes)
        if theirs != (layout.host_page_bytes, layout.key_page_bytes):
            raise BadInput(
                f"the owner's pages have {theirs[0]} bytes and {theirs[1]} of keys, this model's "
                f"{layout.host_page_bytes} and {layout.key_page_bytes}: load the same part of it"
            )
        host_bytes = shared.host_pages * shared.host_page_bytes
        index_bytes = max(shared.index_pages * shared.key_page_bytes, 1)
        try:
            host = map_memory_file(shared.pid, shared.host_fd, host_bytes)
            index = map_memory_file(shared.pid, shared.index_fd, index_bytes)
        except OSError as error:
            raise Unavailable(
                f"the pools of process {shared.pid} cannot be mapped: {error}"
            ) from error
        rows, keys, _ = laid_out(layout, *split(layout, host))
        return cls(layout, rows, keys, KeyPages(layout, index, shared.index_pages))

    @property
    def host_page_count(self) -> int:
        return len(self.rows[0]) // PAGE_ROWS

    @property
    def index_page_count(self) -> int:
        return int(self.active_keys.pages.shape[1])

    def memory(self, layer: int) -> LayerMemory:
        """Without slots: a prompt's chunk reads its rows in place."""
        number = self.layout.key_layer_of(self.layout.group_of(layer))
        keys, row = self.active_keys.pages, self.layout.row_of(layer)
        return LayerMemory(
            slots=torch.empty(0, row.row_bytes, dtype=torch.uint8),
            host=torch.from_numpy(self.rows[layer]),
            key_pages=torch.from_numpy(keys[:0].reshape(0, 0) if number is None else keys[number]),
        )


class MappedRows:
    """One sequence's pages, for one chunk. What is written here is not marked as stored: the owner
    does that (`Sequence.mark_stored`) when every rank of the team has written its part."""

    def __init__(self, pools: MappedPools, host_pages: PageIds, active_pages: PageIds) -> None:
        for name, pages, count in (
            ("host", host_pages, pools.host_page_count),
            ("active", active_pages, pools.index_page_count),
        ):
            if len(pages) and not 0 <= pages.min() <= pages.max() < count:
                raise BadInput(f"{name} pages {pages.min()}..{pages.max()} of {count}")
        assert len(host_pages) == len(active_pages), "a page is on the host and on the device"
        self._pools = pools
        self._host_pages = host_pages
        self._active_pages = active_pages

    @property
    def page_table(self) -> Tensor:
        return torch.from_numpy(self._active_pages)

    def host_rows(self, start: int, count: int) -> Tensor:
        return torch.from_numpy(self._rows(self._host_pages, start, count))

    def import_rows(self, layer: int, start: int, rows: Any) -> None:
        width = self._pools.layout.row_of(layer).row_bytes
        array = as_array(rows, "rows", "uint8", (None, width))
        to_host = self._rows(self._host_pages, start, len(array))
        scatter_rows(source=array, target=self._pools.rows[layer], target_rows=to_host)

    def import_keys(self, layer: int, start: int, keys: Any) -> None:
        pools, number = self._pools, key_layer(self._pools.layout, layer)
        array = as_array(keys, "keys", "uint8", (None, pools.keys.key_bytes))
        pools.keys.write(number, self._rows(self._host_pages, start, len(array)), array)
        pools.active_keys.write(number, self._rows(self._active_pages, start, len(array)), array)

    def mark_stored(self, layer: int, start: int, count: int) -> None:
        return

    def _rows(self, pages: PageIds, start: int, count: int) -> PageIds:
        assert 0 <= start <= start + count <= len(pages) * PAGE_ROWS, f"{start}, {count} rows"
        positions = np.arange(start, start + count, dtype=np.int32)
        rows: PageIds = pages[positions // PAGE_ROWS] * PAGE_ROWS + positions % PAGE_ROWS
        return rows.astype(np.int32, copy=False)


def _on_host(pools: Pools) -> HostPools:
    if not isinstance(pools, HostPools):
        raise Unavailable("index keys on a device cannot be mapped by other processes")
    return pools
