"""Arrival: rows made elsewhere enter the truth, then warm and fill the working set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ess.door import transit
from ess.door.pools import Pools
from ess.door.sequence import Sequence, host_rows, refresh
from ess.errors import BadInput, BadState
from ess.flashtrans.rows import scatter_rows
from ess.layout import ModelLayout
from ess.pool.lru.arena import FetchPlan
from ess.pool.warmup import last_windows, warm_set
from ess.units import PAGE_ROWS

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int32]


def key_group(layout: ModelLayout, layer: int) -> int:
    """The group whose index keys this layer owns."""
    layout.check_layer(layer)
    group = layout.group_of(layer)
    if layout.index is None or layout.groups[group][0] != layer:
        raise BadInput(f"layer {layer} of {layout.name} has no index keys of its own")
    return group


def import_rows(pools: Pools, sequence: Sequence, layer: int, start: int, rows: Bytes) -> None:
    to_host = _importable(sequence, start, len(rows), "rows")
    stored = pools.latent.is_stored(layer, to_host)
    if stored.any():
        raise BadInput(f"layer {layer}: row {start + int(stored.argmax())} was imported already")
    scatter_rows(source=rows, target=pools.latent.rows[layer], target_rows=to_host)
    pools.latent.mark_rows(layer, to_host)
    sequence.is_arriving = True


def import_keys(pools: Pools, sequence: Sequence, group: int, start: int, keys: Bytes) -> None:
    to_host = _importable(sequence, start, len(keys), "keys")
    keyed = pools.latent.is_keyed(group, to_host)
    if keyed.any():
        raise BadInput(f"group {group}: key {start + int(keyed.argmax())} was imported already")
    pools.latent.keys.write(group, to_host, keys)
    pools.latent.mark_keys(group, to_host)
    if sequence.state == "active":
        active_rows = pools.tables.rows(sequence.line, start, len(keys))
        pools.index.keys.write(group, active_rows, keys)
    sequence.is_arriving = True


def _importable(sequence: Sequence, start: int, count: int, what: str) -> Rows:
    sequence.require("active", "preempted")
    low, high = sequence.cached_count, len(sequence.tokens)
    if not low <= start <= start + count <= high:
        raise BadInput(
            f"{what} {start}..{start + count - 1} of sequence {sequence.number}: "
            f"must lie within {low}..{high - 1} (what comes before is cached)"
        )
    return host_rows(sequence, start, count)


def warm(pools: Pools, sequence: Sequence, windows: Rows) -> list[FetchPlan]:
    """Replay [groups, windows, k] selections, oldest first, into every group's working set."""
    sequence.require("active")
    refresh(pools, sequence)
    if windows.size and not -1 <= windows.min() <= windows.max() < sequence.length:
        raise BadInput(
            f"windows select positions {windows.min()}..{windows.max()}, "
            f"must be -1..{sequence.length - 1}"
        )
    plans = []
    for group in range(pools.layout.group_count):
        chosen = warm_set(*last_windows(windows[group]), windows.shape[1])
        rows = _active_rows(pools, sequence, chosen.positions)
        plans.append(_start(pools, pools.sparse.warm(group, rows, chosen.ages)))
    return plans


def fill(pools: Pools, sequence: Sequence, row_max: int | None) -> list[FetchPlan]:
    """The first rows that are absent, into free slots only."""
    sequence.require("active")
    refresh(pools, sequence)
    rows = _active_rows(pools, sequence, np.arange(sequence.length, dtype=np.int32))
    plans = []
    for group in range(pools.layout.group_count):
        absent = rows[pools.sparse.slot_of[group, rows] < 0][:row_max]
        plans.append(_start(pools, pools.sparse.fill(group, absent)))
    return plans


def _active_rows(pools: Pools, sequence: Sequence, positions: Rows) -> Rows:
    pages = pools.tables.lines[sequence.line, positions // PAGE_ROWS]
    rows: Rows = pages * np.int32(PAGE_ROWS) + positions % np.int32(PAGE_ROWS)
    return rows


def _start(pools: Pools, plan: FetchPlan) -> FetchPlan:
    host_rows = pools.index.host_rows(plan.rows)
    try:
        transit.check_stored(pools, plan.group, host_rows)
    except BadState:
        pools.sparse.drop([plan.group], plan.rows)
        raise
    transit.start_fetch(pools, plan, host_rows)
    return plan
