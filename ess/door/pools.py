"""All pools of one worker, sized from a few numbers, and the accounts that admit into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ess.door.arrays import HostArrays, StepArrays
from ess.door.inflight import InFlight, Pending
from ess.door.shelf import Shelf
from ess.errors import BadInput
from ess.flashtrans.lanes import WorkerLane
from ess.flashtrans.views import known
from ess.kernels.memory import host_memory, memory_file
from ess.kernels.streams import Known, Lane
from ess.layout import ModelLayout
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SLOTS, Capacity, whole_count
from ess.pool.disk.tier import DiskTier
from ess.pool.index import ActivePages, IndexPool, PageTables
from ess.pool.latent import Bytes, LatentPool
from ess.pool.ledger import Ledger
from ess.pool.lru.eviction import PolicyName
from ess.pool.pages import PageIds
from ess.pool.sparse import SparsePool
from ess.units import PAGE_ROWS, div_ceil

Ages = npt.NDArray[np.int64]

ADVICE: Final = {
    SLOTS: "raise slot_bytes or lower slot_floor",
    INDEX_PAGES: "raise index_bytes (where it is not given: host_bytes)",
    HOST_PAGES: "raise host_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """What the caller asked for, in bytes and counts; `index_bytes` None means as the host."""

    slot_bytes: int
    host_bytes: int
    index_bytes: int | None
    sequence_max: int
    length_max: int
    query_max: int
    part_max: int
    slot_floor: int
    poison: bool
    shared: bool
    evict: PolicyName = "lru"


class Arenas(Protocol):
    """What there is to know of slots, wherever they are."""

    @property
    def step(self) -> int: ...

    def begin_step(self) -> int: ...

    def slot_count(self, group: int) -> int: ...

    def drop_pages(self, active: PageIds) -> None:
        """All rows of these pages leave every group: their ids may be used again."""

    def hit_age(self, group: int) -> Ages:
        """Hits found at each age since the start."""

    def resident_age(self, group: int) -> Ages:
        """Rows in slots by the age that they will have in the next step."""

    def chunk_slots(self, group: int) -> int: ...

    def chunk_counts(self) -> list[int]: ...

    def chunk_max(self, group: int) -> int:
        """The most that the group may own."""

    def move_chunk(self, source: int, target: int) -> bool: ...

    def check(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools(ABC):
    """The owners, whatever memory the slots and the active pages are in."""

    layout: ModelLayout
    sizes: PoolSizes
    latent: LatentPool
    index: ActivePages
    tables: PageTables
    sparse: Arenas
    ledger: Ledger
    inflight: Pending
    shelf: Shelf | None

    @abstractmethod
    def step_arrays(self, lines: list[int], query_counts: Many[int], room: int) -> StepArrays:
        """Of a step that begins now, over these lines of the tables, padded to `room` queries."""

    def slot_need(self, length_max: int | None) -> int:
        """Slots per group that a sequence of at most this length reserves."""
        return min(length_max or self.sizes.length_max, self.sizes.slot_floor)

    def check(self) -> None:
        for owner in (self.latent, self.index, self.sparse, self.ledger, self.inflight):
            owner.check()
        if self.shelf is not None:
            self.shelf.check()
        self.tables.check(self.index.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPools(Pools):
    """All on the host, and memory as the lane takes it: `slabs` by member, `host` as one matrix of
    all layers' rows and by layer. Fetches of at most `at_once_bytes` do not ask the lane."""

    index: IndexPool
    sparse: SparsePool
    inflight: InFlight
    slabs: tuple[Known, ...]
    host: Known
    host_layers: tuple[Known, ...]
    at_once_bytes: int

    def step_arrays(self, lines: list[int], query_counts: Many[int], room: int) -> StepArrays:
        if room != sum(query_counts):
            raise BadInput(f"room is {room}, but steps on the host have no pads")
        return HostArrays(self.tables, lines, query_counts)

    def at_once_max(self, *, waits: bool) -> int:
        """Bytes of a fetch that its planner copies: all, if the lane shares and it waits anyway."""
        if waits and self.at_once_bytes:
            return self.host.row_count * self.host.row_bytes
        return self.at_once_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Pages and chunks that the sizes pay for."""

    host_pages: int
    index_pages: int
    chunks: int

    @classmethod
    def of(cls, layout: ModelLayout, sizes: PoolSizes) -> Counts:
        host_pages = whole_count("host_bytes", sizes.host_bytes, layout.host_page_bytes)
        index_pages = host_pages
        if sizes.index_bytes is not None:
            index_pages = whole_count("index_bytes", sizes.index_bytes, layout.index_page_bytes)
        chunks = whole_count(
            "slot_bytes", sizes.slot_bytes, layout.chunk_bytes, count_min=layout.group_count
        )
        return cls(host_pages=host_pages, index_pages=index_pages, chunks=chunks)


def build_pools(
    layout: ModelLayout, sizes: PoolSizes, lane: Lane, disk: DiskTier | None = None
) -> HostPools:
    counts = Counts.of(layout, sizes)
    rows, rows_fd = _memory(sizes, "host", counts.host_pages * layout.host_page_bytes)
    keys, keys_fd = _memory(sizes, "index", max(counts.index_pages * layout.key_page_bytes, 1))
    latent = LatentPool(layout, rows, fd=rows_fd, poison=sizes.poison)
    index = IndexPool(
        layout,
        keys,
        page_count=counts.index_pages,
        host_page_count=counts.host_pages,
        fd=keys_fd,
    )
    sparse = SparsePool(
        layout,
        host_memory(counts.chunks * layout.chunk_bytes),
        row_id_count=counts.index_pages * PAGE_ROWS,
        poison=sizes.poison,
        evict=sizes.evict,
    )
    tables = PageTables(
        sequence_max=sizes.sequence_max, page_max=div_ceil(sizes.length_max, PAGE_ROWS)
    )
    return HostPools(
        layout=layout,
        sizes=sizes,
        latent=latent,
        index=index,
        tables=tables,
        sparse=sparse,
        ledger=make_ledger(layout, latent, index, sparse),
        inflight=InFlight(lane),
        shelf=None if disk is None else Shelf(latent, disk),
        slabs=tuple(known(sparse.member_slab(m)) for m in range(layout.group_layers_max)),
        host=known(latent.rows.reshape(-1, layout.row_bytes)),
        host_layers=tuple(known(rows) for rows in latent.rows),
        at_once_bytes=lane.at_once_bytes if isinstance(lane, WorkerLane) else 0,
    )


def _memory(sizes: PoolSizes, name: str, byte_count: int) -> tuple[Bytes, int | None]:
    """And the memory file that it lies in, where other processes map it."""
    if not sizes.shared:
        return host_memory(byte_count), None
    made = memory_file(byte_count, name=name)
    return made.memory, made.fd


def make_ledger(
    layout: ModelLayout, latent: LatentPool, index: ActivePages, sparse: Arenas
) -> Ledger:
    def slots_min() -> int:
        return min(sparse.slot_count(group) for group in range(layout.group_count))

    capacity = Capacity(
        slots=slots_min(),
        index_pages=index.pages.page_count,
        host_pages=latent.pages.page_count,
    )
    used = {
        SLOTS: lambda: capacity.slots - slots_min(),
        INDEX_PAGES: lambda: index.pages.page_count - index.pages.free_count,
        HOST_PAGES: lambda: latent.pages.page_count - latent.free_count,
    }
    accounts = capacity.accounts(layout, used=used)
    return Ledger([replace(account, advice=ADVICE[account.name]) for account in accounts])
