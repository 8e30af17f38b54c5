"""Transfers over stream sockets. `SharedTransport` sends only messages this way, not the bytes.

A connection begins with three Hellos, each sealed and each answering the nonce before it, so both
sides know that the other holds the secret, runs this very boot and keeps rows in the same layout.
Before that, a connection can make us store one Hello and nothing else.

A transfer that misses its deadline ends the connection: part of it is in the stream, and only
ending the stream makes sure that the rest never lands. A peer that has sent nothing for `silent_s`
is lost, unless we ourselves have not looked for so long.
"""

from __future__ import annotations

import secrets
import socket
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ess.clock import Clock
from ess.errors import BadInput
from ess.transfer.endpoint import HEARTBEAT_S, NO_NONCE, Endpoint, Identity
from ess.transfer.messages import NONCE_BYTES
from ess.transfer.runs import Runs, views
from ess.transfer.transport import Event, Transfer
from ess.transfer.transports.channel import Channel, Frame, Kind

STRANGERS_MAX: Final = 64


@dataclass(slots=True, eq=False)
class Link:
    """One connection. `peer` is the epoch that it claims, until `is_met` proves it."""

    channel: Channel
    is_ours: bool
    peer: int
    heard_s: float
    sent_s: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    is_met: bool = False
    waiting: list[tuple[int, Transfer, Runs, Runs]] = field(default_factory=list)


class StreamTransport(Endpoint):
    def __init__(
        self,
        identity: Identity,
        *,
        listener: socket.socket,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(identity, clock=clock)
        self._listener = listener
        self._listener.setblocking(False)
        self._looked_s = self._clock.now_s()
        self._links: list[Link] = []
        self._ours: dict[int, Link] = {}

    def metadata(self) -> bytes:
        return self._identity.hello(address=self._address())

    def connect(self, metadata: bytes) -> int:
        self._check_open()
        envelope, hello = self._identity.greeted(metadata)
        if envelope.sender not in self._ours:
            try:
                self._link(self._dial(hello.address), peer=envelope.sender, is_ours=True)
            except OSError as wrong:
                self._underway.lost(envelope.sender, str(wrong))
        return envelope.sender

    def forbid(self, ticket: int) -> None:
        super().forbid(ticket)
        for link in self._links:
            link.channel.stop_landing(ticket)

    def is_landing(self, ticket: int) -> bool:
        return any(link.channel.is_landing(ticket) for link in self._links)

    def poll(self) -> list[Event]:
        self._check_open()
        self._accept()
        for link in list(self._links):
            self._serve(link)
        for handle, transfer in self._underway.late():
            self._underway.fail(handle, f"not done within {transfer.within_s} s")
            self._lose(transfer.peer, "a transfer missed its deadline")
        self._watch()
        return self._underway.events()

    def disconnect(self, peer: int) -> None:
        for handle in self._underway.of_peer(peer):
            self._underway.fail(handle, f"we disconnected from {peer:016x}")
        self._drop(peer)

    def close(self) -> None:
        for peer in {link.peer for link in self._links}:
            self._drop(peer)
        self._listener.close()
        self._is_closed = True

    @abstractmethod
    def _address(self) -> bytes:
        """The address at which peers connect."""

    @abstractmethod
    def _dial(self, address: bytes) -> socket.socket:
        """A socket connecting to a peer. OSError or BadInput where it cannot."""

    def _link(self, sock: socket.socket, *, peer: int, is_ours: bool) -> Link:
        now_s = self._clock.now_s()
        link = Link(Channel(sock), is_ours, peer, now_s, now_s)
        self._links.append(link)
        if is_ours:
            self._ours[peer] = link
        return link

    def _accept(self) -> None:
        for _ in range(STRANGERS_MAX):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            strangers = [link for link in self._links if not link.peer]
            if len(strangers) >= STRANGERS_MAX:
                self._end(strangers[0])
            link = self._link(sock, peer=0, is_ours=False)
            self._greet(link, answer=NO_NONCE)

    def _greet(self, link: Link, *, answer: bytes) -> None:
        note = self._identity.hello(to=link.peer, nonce=link.nonce, answer=answer)
        link.channel.send(Kind.HELLO, note=note)

    def _serve(self, link: Link) -> None:
        """Reads, acts and writes. Faults of the peer or its network end at most its link."""
        channel = link.channel
        read, sent = channel.read_bytes, channel.sent_bytes
        try:
            for frame in channel.frames(lambda frame: self._place(link, frame)):
                self._act(link, frame)
            if channel.is_full:
                raise BadInput("it asks for much and reads nothing")
            channel.push()
        except (OSError, BadInput) as wrong:
            self._fault_of_link(link, str(wrong))
            return
        if link.is_met and channel.read_bytes > read:
            link.heard_s = self._clock.now_s()
        if channel.sent_bytes > sent:
            link.sent_s = self._clock.now_s()

    def _fault_of_link(self, link: Link, reason: str) -> None:
        if link.is_met or link.is_ours:
            self._lose(link.peer, reason)
        else:
            self._end(link)

    def _place(self, link: Link, frame: Frame) -> Sequence[memoryview] | str:
        if not link.is_met and frame.kind is not Kind.HELLO:
            raise BadInput(f"a {frame.kind.name} before the Hello")
        if frame.kind is not Kind.WRITE:
            return ()
        fault = self._fault(frame.runs, frame.ticket)
        return fault if fault is not None else views(frame.runs, self._regions)

    def _check_open_to(self, link: Link, frame: Frame) -> None:
        transfer = self._underway.find(frame.transfer)
        if transfer is None or transfer.peer != link.peer:
            raise BadInput(f"a {frame.kind.name} to transfer {frame.transfer}, which is not open")

    def _act(self, link: Link, frame: Frame) -> None:
        match frame.kind:
            case Kind.HELLO:
                self._meet(link, frame)
            case Kind.WRITE:
                self._answer(link, frame)
            case Kind.ACCEPTED:
                self._check_open_to(link, frame)
                self._underway.complete(frame.transfer)
            case Kind.REFUSED:
                self._check_open_to(link, frame)
                self._underway.fail(frame.transfer, f"refused: {frame.note[:200]!r}")

    def _answer(self, link: Link, frame: Frame) -> None:
        if frame.refusal is not None:
            note = frame.refusal.encode()
            link.channel.send(Kind.REFUSED, transfer=frame.transfer, note=note)
            return
        link.channel.send(Kind.ACCEPTED, transfer=frame.transfer)
        if frame.note:
            self._underway.notified(link.peer, frame.note)

    def _meet(self, link: Link, frame: Frame) -> None:
        """A Hello came. The dialler answers it and awaits an answer; the accepter the reverse."""
        envelope, hello = self._identity.greeted(frame.note)
        is_first = link.is_ours and hello.answer == NO_NONCE
        if link.is_met or (link.is_ours and envelope.sender != link.peer):
            raise BadInput(f"{envelope.sender:016x} answers, not {link.peer:016x}")
        if not is_first and (hello.answer != link.nonce or envelope.receiver != self.epoch):
            raise BadInput(f"{envelope.sender:016x} does not answer our Hello")
        if not link.is_ours:
            link.peer = envelope.sender
        link.is_met = not is_first
        if is_first or not link.is_ours:
            self._greet(link, answer=hello.nonce)
        for waiting in link.waiting if link.is_met else ():
            self._send(link, *waiting)

    def _start(self, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        link = self._ours.get(transfer.peer)
        if link is None:
            self._underway.fail(handle, f"peer {transfer.peer:016x} is not connected")
        elif link.is_met:
            self._send(link, handle, transfer, local, remote)
        else:
            link.waiting.append((handle, transfer, local, remote))

    def _send(self, link: Link, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        if link.channel.is_full:
            self._underway.fail(handle, "too much waits for a peer that does not read")
            return
        link.channel.send(
            Kind.WRITE,
            transfer=handle,
            ticket=transfer.ticket,
            runs=remote,
            note=transfer.notification,
            payload=views(local, self._regions),
        )

    def _watch(self) -> None:
        """Sends heartbeats, and drops peers that were silent while we were listening."""
        now_s = self._clock.now_s()
        was_away = now_s - self._looked_s > self._identity.silent_s / 2
        self._looked_s = now_s
        for link in list(self._links):
            if was_away:
                link.heard_s = now_s
            elif now_s - link.heard_s > self._identity.silent_s:
                self._fault_of_link(link, f"silent for {now_s - link.heard_s:.1f} s")
            if link.is_met and now_s - link.sent_s >= HEARTBEAT_S:
                link.channel.send(Kind.ALIVE)
                link.sent_s = now_s

    def _lose(self, peer: int, reason: str) -> None:
        if self._drop(peer):
            self._underway.lost(peer, reason)

    def _drop(self, peer: int) -> bool:
        links = [link for link in self._links if link.peer == peer]
        for link in links:
            self._end(link)
        return bool(links)

    def _end(self, link: Link) -> None:
        link.channel.close()
        if link in self._links:
            self._links.remove(link)
        if link.is_ours:
            self._ours.pop(link.peer, None)
