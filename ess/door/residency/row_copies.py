"""From decisions to copies: what the pools plan becomes row copies on the lane."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping

import numpy as np

from ess.array_types import Bytes, RowIds, SlotIds
from ess.door.memory.pools import HostPools
from ess.errors import BadState
from ess.kernels.cpu import native
from ess.kernels.streams import Event, KnownMatrix, RowCopy
from ess.pool.lru.arena import FetchPlan
from ess.units import PAGE_ROWS


def write_new(
    pools: HostPools,
    group: int,
    row_ids: RowIds,
    keys: Bytes | None,
    *,
    slab: KnownMatrix,
    slots: SlotIds,
    rows: Bytes,
) -> None:
    """New rows of a layer into their slots, and their keys, if there are any, into the pages."""
    assert len(rows) == len(slots) == len(row_ids), f"{len(rows)} rows into {len(slots)} slots"
    assert keys is None or len(keys) == len(rows), f"keys of some of {len(rows)} rows only"
    pages, at = pools.index.keys, native.address
    if keys is not None and (pages.unit > 1 or not native.available()):
        pages.write(_key_layer(pools, group), row_ids, keys)
        keys = None
    if not native.available():
        assert isinstance(slab.owner, np.ndarray), "slots lie on the host"
        slab.owner[slots] = rows
        return
    first, page_count, *sizes = (0,) * 4 if keys is None else pages.side(_key_layer(pools, group))
    of_keys = (first, page_count, at(row_ids), 0 if keys is None else at(keys), *sizes)
    of_rows = (slab.address, slab.row_count, at(slots), at(rows), slab.row_bytes, len(rows))
    done = _append()(struct.pack("12q", *of_rows, *of_keys))
    assert done, f"group {group}: a slot of {slab.row_count} or a page of {page_count} is not there"


def _key_layer(pools: HostPools, group: int) -> int:
    number = pools.layout.key_layer_of(group)
    assert number is not None, f"group {group} has no index keys"
    return number


@functools.cache
def _append() -> Callable[[bytes], int]:
    """Takes an `Append` of csrc/cpu/keys.cpp, packed."""
    return native.function("ess_append", [ctypes.c_char_p], ctypes.c_int32)


def check_stored(pools: HostPools, group: int, host_rows: RowIds) -> None:
    """Rows to be read from the host must have been written there, in every layer of the group."""
    for layer in pools.layout.groups[group]:
        stored = pools.latent.is_stored(layer, host_rows)
        if not stored.all():
            missing = int(host_rows[~stored][0])
            raise BadState(
                f"layer {layer}: {int((~stored).sum())} of {len(stored)} selected rows were never "
                f"written; the first is row {missing % PAGE_ROWS} of host page "
                f"{missing // PAGE_ROWS}"
            )


def differing_slots(pools: HostPools, layer: int) -> tuple[SlotIds, RowIds]:
    """Slots whose bytes are not those of their row on the host, and these rows. None, if all is
    well: a clean landed slot is a copy."""
    group = pools.layout.group_of(layer)
    slots, rows = pools.sparse.copies(group)
    slab = pools.sparse.slots_of(group, pools.layout.groups[group].index(layer))
    truth = pools.latent.layers[layer][pools.index.host_rows(rows)]
    differs = (slab[slots] != truth).any(axis=1)
    return slots[differs], rows[differs]


def fetch_copies(pools: HostPools, plan: FetchPlan, host_rows: RowIds) -> list[RowCopy]:
    """One copy per layer of the plan's group, the leader first."""
    assert len(host_rows) == len(plan.slots), f"{len(host_rows)} rows for {len(plan.slots)} slots"
    return [
        RowCopy(
            source=pools.host_layers[layer],
            source_rows=host_rows,
            target=pools.slabs[plan.group][member],
            target_rows=plan.slots,
        )
        for member, layer in enumerate(pools.layout.groups[plan.group])
    ]


def store_copies(
    pools: HostPools, slots_of: Mapping[int, SlotIds], host_rows: RowIds
) -> list[RowCopy]:
    """Rows of whole groups to `host_rows` of all their layers: one copy for all layers side by side
    with rows of one size, since slots of all their groups and members are rows of one slab, and
    their rows lie in one matrix behind one another."""
    copies = []
    for run, host in pools.host_runs:
        members = [
            (slots + member * PAGE_ROWS, layer, group)
            for group, slots in slots_of.items()
            for member, layer in enumerate(pools.layout.groups[group])
            if layer in run
        ]
        if not members:
            continue
        for slots, layer, _ in members:
            assert len(slots) == len(host_rows), f"layer {layer}: {len(slots)} slots"
        firsts = np.array([layer - run.start for _, layer, _ in members])
        firsts *= pools.host_layers[0].row_count
        copies.append(
            RowCopy(
                source=pools.slabs[members[0][2]][0],
                source_rows=np.concatenate([slots for slots, *_ in members]),
                target=host,
                target_rows=(firsts[:, None] + host_rows).reshape(-1),
            )
        )
    return copies


def start_fetch(pools: HostPools, plan: FetchPlan, host_rows: RowIds) -> tuple[Event, ...]:
    """Puts a plan's copies under way, if there is anything to wait for: an event for each layer of
    its group, the leader's first.

    Without rows of its own a plan may still depend on an earlier one (a late hit): the lane is
    first in first out, so an event for everything submitted so far is enough.
    """
    if not plan.is_pending:
        return ()
    assert not plan.is_landed, f"group {plan.group}: what has landed waits for another copy"
    assert not pools.latent.is_unsaid, f"group {plan.group}: a fetch before its rows are said"
    copies = fetch_copies(pools, plan, host_rows)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    commits = [nothing] * (len(copies) - 1) + [lambda: pools.sparse.commit(plan)]
    return tuple(
        pools.inflight.submit([copy], commit) for copy, commit in zip(copies, commits, strict=True)
    )
