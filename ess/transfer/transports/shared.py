"""Between processes of one machine: the sender copies into the peer's own memory.

Registered memory lies in memory files (`ess.kernels.memory`), which a peer maps when it connects,
through the descriptors under the owner's entry in /proc. Other memory can be sent from, but not
written to. A Unix socket carries the Hellos, the notifications and the heartbeats. A copy is cut
into slices, one per `poll`.

The owner cannot stop a copy that the sender has begun, so `guards` is false: a refused ticket stops
the notification, not the bytes.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from struct import Struct, error
from typing import Final

from ess.clock import Clock
from ess.errors import BadInput
from ess.kernels.memory import map_memory_file, memory_file
from ess.transfer.endpoint import Identity
from ess.transfer.runs import Region, Runs, fault_of, views
from ess.transfer.transport import Event, Transfer
from ess.transfer.transports.channel import Kind
from ess.transfer.transports.streams import Link, StreamTransport

SLICE_BYTES: Final = 16 << 20

_OWNER: Final = Struct("<QI")
_REGION: Final = Struct("<IIQQ")

Copy = Iterator[int]
"""A copy in slices: each `next` copies one and yields its bytes."""


def shared_region(number: int, size: int) -> Region:
    """New memory that other processes can map."""
    file = memory_file(size, name=f"region-{number}")
    return Region(number, file.memory, file.fd)


class SharedTransport(StreamTransport):
    guards = False

    def __init__(self, identity: Identity, *, clock: Clock | None = None) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0ess-%016x" % identity.epoch)
        listener.listen()
        super().__init__(identity, listener=listener, clock=clock)
        self._theirs: dict[int, dict[int, Region]] = {}
        self._copies: deque[tuple[int, Link, Copy]] = deque()

    def connect(self, metadata: bytes) -> int:
        envelope, hello = self._identity.greeted(metadata)
        if envelope.sender not in self._ours:
            try:
                self._theirs[envelope.sender] = _regions_of(hello.address)
            except OSError as wrong:
                self._underway.lost(envelope.sender, f"its memory cannot be mapped: {wrong}")
                return envelope.sender
        return super().connect(metadata)

    def poll(self) -> list[Event]:
        budget = SLICE_BYTES
        while self._copies and budget > 0:
            handle, link, copy = self._copies[0]
            transfer = self._underway.find(handle)
            size = next(copy, None) if transfer is not None else None
            if size is not None:
                budget -= size
                continue
            self._copies.popleft()
            if transfer is not None:
                self._tell(link, handle, transfer)
        return super().poll()

    def _address(self) -> bytes:
        name: bytes = self._listener.getsockname()
        ours = [region for region in self._regions.values() if region.fd is not None]
        if self._regions and not ours:
            raise BadInput(f"region {min(self._regions)} is not shared memory: see shared_region")
        rows = [(each.number, each.fd, each.begin, each.memory.size) for each in ours]
        table = b"".join(_REGION.pack(*row) for row in rows)
        return _OWNER.pack(os.getpid(), len(rows)) + table + name

    def _dial(self, address: bytes) -> socket.socket:
        _, count = _OWNER.unpack_from(address)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect(address[_OWNER.size + count * _REGION.size :])
        return sock

    def _send(self, link: Link, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        regions = self._theirs[link.peer]
        sizes = {number: region.memory.size for number, region in regions.items()}
        fault = fault_of(remote, sizes)
        if fault is not None:
            self._underway.fail(handle, f"refused: {fault}")
            return
        copy = _copy(views(local, self._regions), views(remote, regions))
        self._copies.append((handle, link, copy))

    def _tell(self, link: Link, handle: int, transfer: Transfer) -> None:
        link.channel.send(
            Kind.WRITE, transfer=handle, ticket=transfer.ticket, note=transfer.notification
        )

    def _end(self, link: Link) -> None:
        super()._end(link)
        if link.is_ours:
            self._theirs.pop(link.peer, None)
            self._copies = deque(entry for entry in self._copies if entry[1] is not link)


def _copy(sources: list[memoryview], targets: list[memoryview]) -> Copy:
    for source, target in zip(sources, targets, strict=True):
        for begin in range(0, len(source), SLICE_BYTES):
            part = slice(begin, begin + SLICE_BYTES)
            target[part] = source[part]
            yield len(source[part])


def _regions_of(address: bytes) -> dict[int, Region]:
    try:
        pid, count = _OWNER.unpack_from(address)
        table = address[_OWNER.size : _OWNER.size + count * _REGION.size]
        rows = list(_REGION.iter_unpack(table))
    except error:
        raise BadInput(f"{address[:80]!r} is not an address of shared memory") from None
    return {
        number: Region(number, map_memory_file(pid, fd, size, begin=begin))
        for number, fd, begin, size in rows
    }
