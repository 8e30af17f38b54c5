"""How other workers connect, at once, to workers that hand prompts over together. No torch.

A pipeline has a worker for each stage, each with some of the layers and its own end of a transport.
Others connect to all of them by their lead's metadata:

    metadata = magic | version, count | bytes of each frame | Members, sealed | Hellos, sealed

The metadata of a worker that has all layers is its Hello alone. Members, under the seal of the
lead, says who has which layers: without the secret no peer can claim layers, and Hellos of two
boots cannot be combined into one group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

from ess.errors import BadInput
from ess.transfer.messages import FRAME_BYTES_MAX, MEMBERS_MAX, Hello, Members, Seal

METADATA_VERSION: Final = 1
METADATA_BYTES_MAX: Final = 1 << 20

_MAGIC: Final = b"ESSM"
_HEAD: Final = Struct("<4sBBH")
_SIZE: Final = Struct("<I")


@dataclass(frozen=True, slots=True)
class Member:
    """`metadata` is the member's sealed Hello. `layers` are None if it has all."""

    epoch: int
    metadata: bytes
    layers: range | None = None


def joined(seal: Seal, members: Sequence[tuple[bytes, range]]) -> bytes:
    """The metadata of a group, from the Hello and the layers of each member, the lead first."""
    epochs = [_epoch(seal, hello) for hello, _ in members]
    rows = [(epoch, of.start, of.stop) for epoch, (_, of) in zip(epochs, members, strict=True)]
    lead = epochs[0] if epochs else 0
    frames = [seal.sealed(Members(tuple(rows)), sender=lead, receiver=0)]
    frames += [hello for hello, _ in members]
    sizes = b"".join(_SIZE.pack(len(frame)) for frame in frames)
    metadata = _HEAD.pack(_MAGIC, METADATA_VERSION, 0, len(members)) + sizes + b"".join(frames)
    if len(metadata) > METADATA_BYTES_MAX:
        raise BadInput(f"metadata of {len(metadata):,} bytes, at most {METADATA_BYTES_MAX:,}")
    return metadata


def members_of(seal: Seal, metadata: bytes) -> tuple[Member, ...]:
    """The members that metadata describes, the lead first. BadInput unless it is sealed with our
    secret, and exactly what `joined` makes or a Hello."""
    if metadata[:4] != _MAGIC:
        return (Member(_epoch(seal, metadata), metadata),)
    sealed, *hellos = _frames(metadata)
    envelope = seal.opened(sealed)
    if not isinstance(envelope.message, Members):
        raise BadInput(f"Members were due, a {type(envelope.message).__name__} came")
    rows = envelope.message.rows
    epochs = [_epoch(seal, hello) for hello in hellos]
    if epochs != [epoch for epoch, _, _ in rows] or envelope.sender != epochs[0]:
        said = " ".join(f"{epoch:016x}" for epoch in epochs)
        raise BadInput(f"peers {said} are not the group that {envelope.sender:016x} leads")
    return tuple(
        Member(epoch, hello, range(begin, end))
        for hello, (epoch, begin, end) in zip(hellos, rows, strict=True)
    )


def _epoch(seal: Seal, hello: bytes) -> int:
    envelope = seal.opened(hello)
    if not isinstance(envelope.message, Hello):
        raise BadInput(f"a Hello was due, a {type(envelope.message).__name__} came")
    return envelope.sender


def _frames(metadata: bytes) -> Iterator[bytes]:
    """The frames that make up the bytes, each no longer than a frame can be."""
    if not _HEAD.size <= len(metadata) <= METADATA_BYTES_MAX:
        raise BadInput(f"metadata of {len(metadata):,} bytes, at most {METADATA_BYTES_MAX:,}")
    _, version, zero, count = _HEAD.unpack_from(metadata)
    if version != METADATA_VERSION or zero:
        raise BadInput(f"metadata of version {version}, not of {METADATA_VERSION}")
    if not 0 < count <= MEMBERS_MAX:
        raise BadInput(f"metadata of {count} workers, must be 1 to {MEMBERS_MAX}")
    begin = _HEAD.size + _SIZE.size * (count + 1)
    if len(metadata) < begin:
        raise BadInput(f"metadata of {count} workers in {len(metadata)} bytes")
    sizes = [size for (size,) in _SIZE.iter_unpack(metadata[_HEAD.size : begin])]
    if begin + sum(sizes) != len(metadata):
        raise BadInput(f"metadata of {len(metadata):,} bytes, and its frames are of {sum(sizes):,}")
    if max(sizes) > FRAME_BYTES_MAX:
        raise BadInput(f"metadata with a frame of {max(sizes):,} bytes, at most {FRAME_BYTES_MAX}")
    for size in sizes:
        yield metadata[begin : begin + size]
        begin += size
