"""What the stages of a pipeline send one another, as bytes. Needs no torch.

    head    magic, version; then records to the end
    record  kind, bytes of body; body          little endian

A head is read in full or refused as BadInput; allocations are limited by its own length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final

from ess.errors import BadInput

MAGIC: Final = b"ESSP\x01"
HEAD_BYTES_MAX: Final = 1 << 20

_RECORD: Final = Struct("<BI")


def record(kind: int, body: bytes) -> bytes:
    size_max = HEAD_BYTES_MAX - len(MAGIC) - _RECORD.size
    if len(body) > size_max:
        raise BadInput(f"a record of kind {kind} has {len(body)} bytes, at most {size_max}")
    return _RECORD.pack(kind, len(body)) + body


def head(records: Iterable[bytes]) -> bytes:
    content = MAGIC + b"".join(records)
    assert len(content) <= HEAD_BYTES_MAX, f"a head of {len(content)} bytes"
    return content


def records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The kind and the body of each record."""
    if content[: len(MAGIC)] != MAGIC or len(content) > HEAD_BYTES_MAX:
        raise BadInput(
            f"a head of {len(content)} bytes that begins {content[:8]!r} is not of a stage"
        )
    at = len(MAGIC)
    while at < len(content):
        if at + _RECORD.size > len(content):
            raise BadInput(f"the head ends inside a record at byte {at}")
        kind, size = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        if at + size > len(content):
            raise BadInput(f"a record of {size} bytes at {at}, the head has {len(content)}")
        yield kind, content[at : at + size]
        at += size


def fixed(struct: Struct, body: bytes, what: str) -> tuple[int, ...]:
    """The values of a body that is exactly this struct."""
    if len(body) != struct.size:
        raise BadInput(f"{what} has {len(body)} bytes, not {struct.size}")
    return struct.unpack(body)


def leading(struct: Struct, body: bytes, what: str) -> tuple[tuple[int, ...], bytes]:
    """The values of the struct at the front of a body, and the bytes behind it."""
    if len(body) < struct.size:
        raise BadInput(f"{what} has {len(body)} bytes, not {struct.size} and more")
    return struct.unpack_from(body), body[struct.size :]
