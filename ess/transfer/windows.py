"""The windows of a handoff in few bytes: the positions they select, and each one's last window.

    packed = head | a bitmap per group | a byte per position set in the bitmaps
    head     magic, windows, groups, positions
    bitmap   bit p of group g: some window of g selects position p; low bits first
    bytes    the last window that selects it, counted from the oldest; position by position

Warming needs only a position and its last window (`ess.pool.warmup`), so 32 selections of 2,048
positions shrink to the few thousand different ones: 16 MB for 61 groups at 128K shrink to 1.3 to
1.8. Without windows there is only a head.

The bytes are not trusted: any peer may have written them. The reader knows the groups and the
positions, so it allocates nothing by a size that the bytes name, and refuses a bit without its
byte.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ess.errors import BadInput
from ess.pool.warmup import WINDOW_MAX, WindowSet
from ess.units import div_ceil

LENGTH_MAX: Final = (1 << 31) - 1

_MAGIC: Final = b"ESW1"
_HEAD: Final = Struct("<4sIII")

Bytes = NDArray[np.uint8]


def packed_windows(windows: NDArray[np.int32], length: int) -> bytes:
    """`windows` [groups, w, k], oldest first, -1 padded: positions of a sequence of `length`."""
    _check(windows, length)
    group_count, window_count, k = windows.shape
    head = _HEAD.pack(_MAGIC, window_count, group_count, length)
    if window_count == 0:
        return head
    number = np.repeat(np.arange(1, window_count + 1, dtype=np.uint8), k)
    last = np.empty(length + 1, np.uint8)
    bitmaps, chosen = [], []
    for selected in windows:
        last[:] = 0
        last[selected.reshape(-1)] = number  # the latest wins; -1 is behind the end
        is_chosen = last[:length] != 0
        bitmaps.append(np.packbits(is_chosen, bitorder="little").tobytes())
        chosen.append((last[:length][is_chosen] - np.uint8(1)).tobytes())
    return b"".join([head, *bitmaps, *chosen])


def unpacked_windows(
    raw: bytes | memoryview, *, group_count: int, length: int
) -> tuple[list[WindowSet], int]:
    """A WindowSet for each group, as `last_windows` makes it, and the number of windows.

    BadInput for bytes that `packed_windows` cannot have made for these groups and positions.
    """
    window_count, body = _opened(raw, group_count, length)
    if window_count == 0:
        if len(body):
            raise BadInput(f"windows: {len(body)} bytes behind no windows")
        return [(np.empty(0, np.int32), np.empty(0, np.int32))] * group_count, 0
    bitmap_bytes = div_ceil(length, 8)
    split = group_count * bitmap_bytes
    if len(body) < split:
        raise BadInput(f"windows: bitmaps of {len(body)} bytes, not of {split}")
    bitmaps, last = body[:split].reshape(group_count, bitmap_bytes), body[split:]
    if len(last) and int(last.max()) >= window_count:
        raise BadInput(f"windows: a position was selected by window {last.max()} of {window_count}")
    return _sets(bitmaps, last, length), window_count


def window_bytes_max(group_count: int, length_max: int, top_k: int | None = None) -> int:
    """The most bytes that windows of `top_k` positions each can take."""
    chosen_max = length_max if top_k is None else min(length_max, WINDOW_MAX * top_k)
    return _HEAD.size + group_count * (div_ceil(length_max, 8) + chosen_max)


def _check(windows: NDArray[np.int32], length: int) -> None:
    if windows.ndim != 3 or windows.shape[1] > WINDOW_MAX:
        raise BadInput(f"windows of shape {windows.shape}, not [groups, 0 to {WINDOW_MAX}, k]")
    if not 0 <= length <= LENGTH_MAX:
        raise BadInput(f"windows over {length} positions, must be 0 to {LENGTH_MAX}")
    if windows.size and not -1 <= windows.min() <= windows.max() < length:
        raise BadInput(
            f"windows select positions {windows.min()}..{windows.max()}, must be -1..{length - 1}"
        )


def _opened(raw: bytes | memoryview, group_count: int, length: int) -> tuple[int, Bytes]:
    """The number of windows in the head, and the bytes behind the head."""
    size_max = window_bytes_max(group_count, length)
    if not _HEAD.size <= len(raw) <= size_max:
        raise BadInput(f"windows of {len(raw)} bytes, not of {_HEAD.size} to {size_max}")
    magic, window_count, groups, positions = _HEAD.unpack_from(raw)
    if magic != _MAGIC or window_count > WINDOW_MAX:
        raise BadInput(f"windows that begin {bytes(raw[:8])!r}")
    if (groups, positions) != (group_count, length):
        raise BadInput(
            f"windows of {groups} groups over {positions} positions, "
            f"not of {group_count} over {length}"
        )
    return window_count, np.frombuffer(raw, np.uint8, offset=_HEAD.size)


def _sets(bitmaps: Bytes, last: Bytes, length: int) -> list[WindowSet]:
    sets, begin = [], 0
    for bitmap in bitmaps:
        positions = np.flatnonzero(np.unpackbits(bitmap, bitorder="little").view(np.bool_))
        end = begin + len(positions)
        if end > len(last) or (len(positions) and positions[-1] >= length):
            raise BadInput(f"windows: a bitmap names more than {len(last)} positions of {length}")
        sets.append((positions.astype(np.int32), last[begin:end].astype(np.int32)))
        begin = end
    if begin != len(last):
        raise BadInput(f"windows: {len(last)} bytes for {begin} positions")
    return sets
