"""Varints: 7 bits per byte, low bits first; the high bit of a byte says that more follow."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput

BYTES_MAX: Final = 9

Int64Array = npt.NDArray[np.int64]


def encode(values: npt.ArrayLike) -> bytes:
    """Non-negative integers below 2**63 as one stream.

    >>> encode([0, 127, 128, 300]).hex(" ")
    '00 7f 80 01 ac 02'
    """
    left = np.asarray(values, dtype=np.int64)
    assert left.ndim == 1, "one stream is one list of numbers"
    assert int(left.min(initial=0)) >= 0, "a varint is not negative"
    largest = int(left.max(initial=0))
    if largest < 128:
        return left.astype(np.uint8).tobytes()
    sizes = np.ones(left.size, dtype=np.int64)
    for bits in range(7, largest.bit_length(), 7):
        sizes += left >> bits > 0
    starts = np.cumsum(sizes) - sizes
    stream = np.empty(int(sizes.sum()), dtype=np.uint8)
    stream[starts] = left & 127
    for place in range(1, int(sizes.max())):
        longer = np.flatnonzero(sizes > place)
        stream[starts[longer] + place - 1] |= 128
        stream[starts[longer] + place] = left[longer] >> 7 * place & 127
    return stream.tobytes()


def decode(stream: bytes, *, count_max: int) -> Int64Array:
    """The numbers of a stream. BadInput where `encode` cannot have written it."""
    raw = np.frombuffer(stream, dtype=np.uint8)
    ends = np.flatnonzero(raw < 128)
    if ends.size > count_max:
        raise BadInput(f"{ends.size} numbers stand where at most {count_max} can")
    if raw.size and raw[-1] >= 128:
        raise BadInput(f"the last of {ends.size + 1} numbers is cut off")
    sizes = np.diff(ends, prepend=-1)
    longest = int(sizes.max(initial=1))
    if longest > BYTES_MAX:
        raise BadInput(f"a number takes {longest} bytes, at most {BYTES_MAX} are allowed")
    values = raw[ends].astype(np.int64)
    if bool((values[sizes > 1] == 0).any()):
        raise BadInput("a number is padded with a zero byte; the writer never does that")
    for place in range(1, longest):
        longer = np.flatnonzero(sizes > place)
        values[longer] = values[longer] << 7 | raw[ends[longer] - place] & 127
    return values
