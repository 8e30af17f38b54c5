"""One group of one step as bytes: the counts of its queries, then the gaps between positions.

A selection is ascending, so gaps are small: most of 2,048 positions among 131,072 take one byte.
Pads are not stored; the counts imply them. Scores are one byte a position, zlib-compressed.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.trace import varints
from ess.trace.form import PAYLOAD_BYTES_MAX, VALUES_MAX, TraceHeader

_SHAPE: Final = struct.Struct("<II")


def check(selection: npt.NDArray[Any], header: TraceHeader) -> None:
    """Requires [queries, up to top_k] signed integers, ascending, distinct, -1 only at the end."""
    if selection.ndim != 2 or selection.dtype.kind != "i":
        raise BadInput(
            f"a selection is [queries, top_k] of signed integers, "
            f"not {selection.dtype} of shape {selection.shape}"
        )
    if selection.shape[1] > header.top_k:
        raise BadInput(f"{selection.shape[1]} columns are more than the top_k {header.top_k}")
    check_size(len(selection), header)
    low, high = int(selection.min(initial=-1)), int(selection.max(initial=-1))
    if low < -1 or high >= header.context:
        raise BadInput(f"positions {low}..{high} leave -1..{header.context - 1}")
    left, right = selection[:, :-1], selection[:, 1:]
    wrong = np.argwhere((right != -1) & ((right <= left) | (left == -1)))
    if wrong.size:
        query, column = (int(place) for place in wrong[0])
        raise BadInput(
            f"query {query}: {right[query, column]} follows {left[query, column]} in column "
            f"{column + 1}; give positions ascending, each once, -1 only at the end"
        )


def check_size(query_count: int, header: TraceHeader) -> None:
    if query_count * header.top_k > VALUES_MAX:
        raise BadInput(f"{query_count} queries x {header.top_k} exceed {VALUES_MAX} values")


def encode(group: int, selection: npt.NDArray[Any]) -> bytes:
    present = selection >= 0
    gaps = np.diff(selection, axis=1, prepend=selection.dtype.type(-1))[present] - 1
    counts = np.count_nonzero(present, axis=1)
    return varints.encode(np.concatenate(([group, len(counts)], counts, gaps)))


def decode(
    payload: bytes, *, group: int, query_count: int, header: TraceHeader
) -> npt.NDArray[np.int32]:
    check_size(query_count, header)
    values = varints.decode(payload, count_max=2 + query_count * (1 + header.top_k))
    counts, gaps = values[2 : 2 + query_count], values[2 + query_count :]
    if values[:2].tolist() != [group, query_count] or len(counts) != query_count:
        raise BadInput(f"this is not group {group} with {query_count} queries")
    if int(counts.max(initial=0)) > header.top_k or counts.sum() != len(gaps):
        raise BadInput(f"the counts of group {group} do not fit its {len(gaps)} positions")
    largest = int(gaps.max(initial=0))
    present = np.arange(header.top_k) < counts[:, None]
    strides = np.zeros(present.shape, dtype=np.int64)
    strides[present] = np.minimum(gaps, header.context) + 1
    positions = np.cumsum(strides, axis=1) - 1
    if max(largest, int(positions.max(initial=0))) >= header.context:
        raise BadInput(f"a position of group {group} leaves the context of {header.context}")
    return np.where(present, positions, -1).astype(np.int32)


def encode_scores(scores: npt.NDArray[Any], header: TraceHeader) -> bytes:
    if scores.ndim != 2 or scores.dtype != np.uint8:
        raise BadInput(f"scores are [queries, positions] of uint8, not {scores.dtype}")
    if scores.shape[1] > header.context or scores.size > PAYLOAD_BYTES_MAX:
        raise BadInput(f"scores of {scores.shape}: a context of {header.context} has fewer")
    return _SHAPE.pack(*scores.shape) + zlib.compress(scores.tobytes(), 1)


def decode_scores(
    payload: bytes, *, query_count: int, header: TraceHeader
) -> npt.NDArray[np.uint8]:
    if len(payload) < _SHAPE.size:
        raise BadInput("the scores have no shape")
    queries, width = _SHAPE.unpack_from(payload)
    if queries != query_count or width > header.context or queries * width > PAYLOAD_BYTES_MAX:
        raise BadInput(f"scores of [{queries}, {width}] for {query_count} queries")
    opened = zlib.decompressobj()
    try:
        values = opened.decompress(payload[_SHAPE.size :], queries * width + 1)
    except zlib.error as error:
        raise BadInput(f"the scores are damaged: {error}") from None
    if len(values) != queries * width:
        raise BadInput(f"{len(values)} scores are not [{queries}, {width}]")
    return np.frombuffer(values, np.uint8).reshape(queries, width)
