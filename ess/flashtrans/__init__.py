"""FlashTrans moves: many small rows in one call, and the lanes they travel on."""

from ess.flashtrans.lanes import InlineLane, WorkerLane, open_lane
from ess.flashtrans.rows import copy_rows, gather_rows, scatter_rows

__all__ = [
    "InlineLane",
    "WorkerLane",
    "copy_rows",
    "gather_rows",
    "open_lane",
    "scatter_rows",
]
