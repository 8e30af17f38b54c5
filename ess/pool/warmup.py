"""Warm-up: replay the last prefill windows into the working set, as if decode had made them.

A window is one late prefill query's selection; the last 32 travel with a handoff as (row, number of
the last window that chose it). Replaying windows oldest first through an LRU leaves each row with
the age of its last window, and under pressure keeps the newest. So the replay needs no loop: order
the rows by last window, newest first, give each the age it would have, and let a row in only while
it finds a victim older than itself. Rows of one window are in position order (the tie rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int32]
WindowSet = tuple[Positions, Positions]
"""Distinct positions in ascending order, and the last window that chose each."""

WINDOW_MAX: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSet:
    """Positions, newest window first, and the age of each when decode begins."""

    positions: Positions
    ages: Positions


def last_windows(windows: Positions) -> WindowSet:
    """Distinct positions of `windows` [w, k] (oldest first, -1 padded) and their last window."""
    assert windows.ndim == 2, f"windows of shape {windows.shape}, not [window, position]"
    number = np.repeat(np.arange(len(windows), dtype=np.int32), windows.shape[1])
    flat = windows.reshape(-1)
    flat, number = flat[flat >= 0], number[flat >= 0]
    # In the reversed list the first occurrence of a position is its last window.
    positions, first = np.unique(flat[::-1], return_index=True)
    last = number[::-1][first]
    assert len(positions) <= windows.size, "more positions than were chosen"
    return positions.astype(np.int32), last


def warm_set(positions: Positions, windows: Positions, window_count: int) -> WarmSet:
    """Orders (position, last window) pairs by window, newest first; window 0 is the oldest."""
    assert positions.shape == windows.shape, f"{positions.size} positions, {windows.size} windows"
    assert ((windows >= 0) & (windows < window_count)).all(), "a window outside the replay"
    order = np.lexsort((positions, -windows))
    ages = np.int32(window_count) - windows[order]
    return WarmSet(positions=positions[order], ages=ages.astype(np.int32))
