"""A chunk of slots from one layer group to another, as the live budgets would move it."""

from __future__ import annotations

from ess.door import Offload


def move_budget(offload: Offload, *, source: int, target: int) -> bool:
    """False if all are in use, or promised to running sequences."""
    pools = offload._pools
    if pools.sparse.chunks.counts()[source] <= offload._side.budgets.floor(source):
        return False
    pools.inflight.settle()
    return pools.sparse.move_chunks(source, target)
