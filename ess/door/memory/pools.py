"""All pools of one worker, sized from a few numbers, and the accounts that admit into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from ess.array_types import Bytes, PageIds, RowIds
from ess.door.memory.inflight import InFlight, Pending
from ess.door.memory.shelf import Shelf
from ess.door.sequences.states import States
from ess.door.steps.arrays import Brought, HostArrays, StepArrays
from ess.errors import BadInput
from ess.flashtrans.lanes import WorkerLane
from ess.flashtrans.patient import PatientLane
from ess.flashtrans.views import known
from ess.kernels.memory import host_memory, memory_file
from ess.kernels.streams import KnownMatrix, Lane
from ess.layout import ModelLayout
from ess.pool.capacity import (
    HOST_PAGES,
    INDEX_PAGES,
    SLOTS,
    WINDOW_SLOTS,
    Capacity,
    least_chunks,
    slots_min,
    whole_count,
)
from ess.pool.chunks import Chunks
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import DiskTier
from ess.pool.index import ActivePages, IndexPool, PageTables
from ess.pool.latent import Common, CommonMemory, LatentPool
from ess.pool.ledger import Ledger
from ess.pool.lru.eviction import PolicyName
from ess.pool.sparse import SparsePool
from ess.units import PAGE_ROWS

Ages = npt.NDArray[np.int64]

PAGES_MAX: Final = (1 << 31) // PAGE_ROWS - 1
"""Codes of rows in place are -2 - row, in 32 bits."""
ADVICE: Final = {
    SLOTS: "raise slot_bytes or lower slot_floor",
    WINDOW_SLOTS: "raise slot_bytes",
    INDEX_PAGES: "raise index_bytes (where it is not given: host_bytes)",
    HOST_PAGES: "raise host_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes from the caller, in bytes and counts. Without `index_bytes` there are as many active
    pages as host pages."""

    slot_bytes: int
    host_bytes: int
    index_bytes: int | None
    sequence_max: int
    length_max: int
    query_max: int
    slot_floor: int
    poison: bool
    shared: bool
    evict: PolicyName = "lru"


class Arenas(Protocol):
    """What the pools ask of slots, on the host or on a device."""

    @property
    def step(self) -> int: ...

    @property
    def now(self) -> int:
        """The step as slots name it, in 32 bits."""

    @property
    def chunks(self) -> Chunks: ...

    def begin_step(self) -> int: ...

    def slot_count(self, group: int) -> int: ...

    def drop_pages(self, active: PageIds) -> None:
        """All rows of these pages leave every group: their ids may be used again."""

    def hit_age(self, group: int) -> Ages:
        """Hits found at each age since the start."""

    def resident_age(self, group: int) -> Ages:
        """Rows in slots by the age that they will have in the next step."""

    def move_chunks(self, source: int, target: int, count: int = 1) -> bool: ...

    def check(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools(ABC):
    """The owners of the pools, for any memory that slots and active pages may be in."""

    layout: ModelLayout
    sizes: PoolSizes
    latent: LatentPool
    index: ActivePages
    tables: PageTables
    sparse: Arenas
    ledger: Ledger
    inflight: Pending
    shelf: Shelf | None
    states: States | None = None
    """The states of a layout whose requests keep something beside their rows."""
    has_pads: ClassVar[bool] = False
    """Whether a step may have room for more queries than it brings."""

    @abstractmethod
    def step_arrays(
        self, lines: list[int], query_counts: Many[int], room: int, brought: Brought | None
    ) -> StepArrays:
        """The arrays of a step that begins now, over these lines of the tables, padded to `room`
        queries; each query brings a row, unless `brought` says what is brought."""

    def slot_needs(self, length_max: int | None) -> dict[str, int]:
        """Slots per group that a sequence of at most this length reserves."""
        longest = length_max or self.sizes.length_max
        each = self.layout.slots_of(longest, self.sizes.slot_floor)
        windows = self.layout.window_floor
        return {SLOTS: each, WINDOW_SLOTS: min(each, windows)} if windows else {SLOTS: each}

    def are_stored(self, group: int, rows: RowIds) -> npt.NDArray[np.bool_]:
        """Which of these rows the host has, in all layers of the group."""
        host_rows = self.index.host_rows(rows)
        stored = np.ones(len(rows), np.bool_)
        for layer in self.layout.groups[group]:
            stored &= self.latent.is_stored(layer, host_rows)
        return stored

    def check(self) -> None:
        for owner in (self.latent, self.index, self.sparse, self.ledger, self.inflight):
            owner.check()
        if self.shelf is not None:
            self.shelf.check()
        self.tables.check(self.index.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPools(Pools):
    """All on the host, and memory as the lane takes it: `slabs` by group and member, `host_layers`
    by layer and `host_runs` by neighbouring layers with rows of one size, each with the first of
    these layers. Fetches of at most `at_once_bytes` do not ask the lane."""

    index: IndexPool
    sparse: SparsePool
    inflight: InFlight
    slabs: tuple[tuple[KnownMatrix, ...], ...]
    host_runs: tuple[tuple[range, KnownMatrix], ...]
    host_layers: tuple[KnownMatrix, ...]
    at_once_bytes: int

    def step_arrays(
        self, lines: list[int], query_counts: Many[int], room: int, brought: Brought | None
    ) -> StepArrays:
        assert room == sum(query_counts), f"room is {room}, and steps on the host are not padded"
        return HostArrays(self.tables, lines, query_counts, brought)

    def at_once_max(self, *, waits: bool) -> int:
        """Bytes of a fetch that its planner copies: all, if the lane shares and it waits anyway."""
        if waits and self.at_once_bytes:
            return self.latent.row_memory.nbytes
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
            "slot_bytes", sizes.slot_bytes, layout.chunk_bytes, count_min=least_chunks(layout)
        )
        for name, count in (("host_bytes", host_pages), ("index_bytes", index_pages)):
            if count > PAGES_MAX:
                raise BadInput(
                    f"{name} holds {count:,} pages, at most {PAGES_MAX:,}: row numbers have 31 bits"
                )
        return cls(host_pages=host_pages, index_pages=index_pages, chunks=chunks)


def build_pools(
    layout: ModelLayout,
    sizes: PoolSizes,
    lane: Lane,
    disk: DiskTier | Elsewhere | None = None,
    common: Common | None = None,
) -> HostPools:
    counts = Counts.of(layout, sizes)
    host, host_fd = _host(layout, sizes, counts, common)
    keys, keys_fd = _memory(sizes, "index", max(counts.index_pages * layout.key_page_bytes, 1))
    latent = LatentPool(layout, host, fd=host_fd, poison=sizes.poison, common=common)
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
        slots_each=layout.slots_of(sizes.length_max, sizes.slot_floor),
    )
    tables = PageTables(sequence_max=sizes.sequence_max, page_max=layout.pages_of(sizes.length_max))
    states = make_states(layout, sizes)
    if states is not None:
        latent.prefix.listeners.append(states.kept)
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
        states=states,
        slabs=_known_slots(sparse),
        host_runs=tuple((run, known(_together(latent, run))) for run in layout.row_runs),
        host_layers=tuple(known(rows) for rows in latent.layers),
        at_once_bytes=lane.at_once_bytes if isinstance(lane, WorkerLane | PatientLane) else 0,
    )


def _host(
    layout: ModelLayout, sizes: PoolSizes, counts: Counts, common: Common | None
) -> tuple[Bytes | CommonMemory, int | None]:
    if common is not None:
        return common.memory(counts.host_pages), None
    return _memory(sizes, "host", counts.host_pages * layout.host_page_bytes)


def make_states(layout: ModelLayout, sizes: PoolSizes) -> States | None:
    if not layout.has_states:
        return None
    return States(layout, sequence_max=sizes.sequence_max, length_max=sizes.length_max)


def _known_slots(sparse: SparsePool) -> tuple[tuple[KnownMatrix, ...], ...]:
    return tuple(
        tuple(known(sparse.slots_of(group, member)) for member in range(len(layers)))
        for group, layers in enumerate(sparse.layout.groups)
    )


def _together(latent: LatentPool, run: range) -> Bytes:
    """Rows of these layers as one matrix."""
    first = sum(latent.layers[layer].nbytes for layer in range(run.start))
    width, size = latent.layers[run.start].shape[1], len(run) * latent.layers[run.start].nbytes
    return latent.row_memory[first : first + size].reshape(-1, width)


def _memory(sizes: PoolSizes, name: str, byte_count: int) -> tuple[Bytes, int | None]:
    """The pool's memory, and its memory file if other processes map it."""
    if not sizes.shared:
        return host_memory(byte_count), None
    file = memory_file(byte_count, name=name)
    return file.memory, file.fd


def make_ledger(
    layout: ModelLayout, latent: LatentPool, index: ActivePages, sparse: Arenas
) -> Ledger:
    def slots_now() -> dict[str, int]:
        return slots_min(layout, sparse.slot_count)

    capacity = Capacity(
        **slots_now(),
        index_pages=index.pages.page_count,
        host_pages=latent.pages.page_count,
    )
    used = {
        SLOTS: lambda: capacity.slots - slots_now()["slots"],
        WINDOW_SLOTS: lambda: capacity.window_slots - slots_now()["window_slots"],
        INDEX_PAGES: lambda: index.pages.page_count - index.pages.free_count,
        HOST_PAGES: lambda: latent.pages.page_count - latent.free_count,
    }
    accounts = capacity.accounts(layout, used=used)
    return Ledger([replace(account, advice=ADVICE[account.name]) for account in accounts])
