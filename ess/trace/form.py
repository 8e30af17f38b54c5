"""The parts of a trace file: preamble, frames, trailer, and the fields of a header and a step."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Final

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput
from ess.trace import varints

VERSION: Final = 1
VERSION_SCORED: Final = 2
VALUES_MAX: Final = 1 << 24
HEADER_BYTES_MAX: Final = 1 << 20
PAYLOAD_BYTES_MAX: Final = 1 << 27

MAGIC: Final = b"ESSTRACE"
END: Final = b"ESSTREND"
STEP: Final = b"STEP"
SELECTION: Final = b"SELS"
SCORES: Final = b"SCRS"
INDEX: Final = b"INDX"

PREAMBLE: Final = struct.Struct("<8sIII")
FRAME: Final = struct.Struct("<4sII")
TRAILER: Final = struct.Struct("<QI8s")
_PLACE: Final = struct.Struct("<4sIQ")


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the trace was recorded from. Every position is below `context`.

    `mtp` is the most queries that one request has in one step: 1 without drafts. In a `scored`
    trace every selection comes with the scores, of all positions, that led to it.
    """

    layout: str
    group_count: int
    top_k: int
    mtp: int
    context: int
    metadata: dict[str, str | int | float | bool] = {}
    scored: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("group_count", self.group_count, 1 << 12),
            ("top_k", self.top_k, 1 << 16),
            ("mtp", self.mtp, 1 << 8),
            ("context", self.context, (1 << 31) - 1),
        ):
            if not 1 <= value <= most:
                raise BadInput(f"trace header: {name} is {value}, must be in 1..{most}")


class RequestStep(msgspec.Struct, frozen=True, kw_only=True):
    """One request in one step: `length` tokens before it, its queries, how many were accepted."""

    request: int
    length: int
    query_count: int
    accepted: int


def check_requests(requests: Sequence[RequestStep], header: TraceHeader) -> None:
    for entry in requests:
        if not (
            0 <= entry.request < 1 << 63
            and 0 <= entry.accepted <= entry.query_count <= header.mtp
            and 0 <= entry.length <= header.context - entry.query_count
        ):
            raise BadInput(
                f"{entry} breaks accepted <= query_count <= mtp {header.mtp} "
                f"or length + query_count <= context {header.context}"
            )


def encode_step(number: int, requests: Sequence[RequestStep], group_sizes: Sequence[int]) -> bytes:
    """Number and request count, the requests column by column, the frame size of every group."""
    columns = [getattr(entry, name) for name in RequestStep.__struct_fields__ for entry in requests]
    return varints.encode([number, len(requests), *columns, *group_sizes])


def decode_step(
    payload: bytes, header: TraceHeader
) -> tuple[int, tuple[RequestStep, ...], list[int]]:
    names = RequestStep.__struct_fields__
    values = varints.decode(payload, count_max=len(payload)).tolist()
    request_count = values[1] if len(values) > 1 else 0
    if len(values) != 2 + len(names) * request_count + header.group_count:
        raise BadInput(f"{len(values)} numbers are not {request_count} requests and all groups")
    split = len(values) - header.group_count
    columns = [
        values[start : start + request_count] for start in range(2, split, request_count or 1)
    ]
    requests = tuple(
        RequestStep(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)
    )
    check_requests(requests, header)
    return values[0], requests, values[split:]


def encode_preamble(header: TraceHeader) -> tuple[bytes, int]:
    """The first bytes of a file, and their check, which is the seed of every later check."""
    version = VERSION_SCORED if header.scored else VERSION
    fields = msgspec.structs.asdict(header)
    if not header.scored:
        del fields["scored"]
    try:
        payload = msgspec.msgpack.encode(fields)
    except (TypeError, OverflowError) as error:
        raise BadInput(f"trace header: {error}; metadata holds text and numbers") from None
    if len(payload) > HEADER_BYTES_MAX:
        raise BadInput(f"the trace header takes {len(payload)} bytes, at most {HEADER_BYTES_MAX}")
    seed = zlib.crc32(payload, version)
    decode_header(payload, check=seed, version=version)
    return PREAMBLE.pack(MAGIC, version, len(payload), seed) + payload, seed


def decode_header(payload: bytes, *, check: int, version: int) -> TraceHeader:
    if zlib.crc32(payload, version) != check:
        raise BadInput("the header is damaged: its check does not fit")
    try:
        header = msgspec.msgpack.decode(payload, type=TraceHeader)
    except UNDECODABLE as error:
        raise BadInput(f"the header is not of version {version}: {error}") from None
    if header.scored != (version == VERSION_SCORED):
        raise BadInput(f"the header is not of version {version}: scored is {header.scored}")
    return header


def frame_check(kind: bytes, payload: bytes, *, offset: int, seed: int) -> int:
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(kind, len(payload), offset), seed))


def encode_frame(kind: bytes, payload: bytes, *, offset: int, seed: int) -> bytes:
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadInput(f"a frame of {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX} fit")
    check = frame_check(kind, payload, offset=offset, seed=seed)
    return FRAME.pack(kind, len(payload), check) + payload


def trailer_check(index_offset: int, *, seed: int) -> int:
    return zlib.crc32(index_offset.to_bytes(8, "little"), seed)
