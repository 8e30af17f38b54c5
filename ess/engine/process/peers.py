"""The engine process among other workers: how rows travel, and whom it has met."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import fields
from typing import Final

from ess.clock import Clock
from ess.door import Offload
from ess.door.handoff.arriving import Marks
from ess.door.handoff.endings import Lapsed, Sent, Timeline
from ess.door.handoff.port import Port
from ess.door.handoff.receiver import Landed, Missed
from ess.engine.handoff import Ended
from ess.engine.process.messages import (
    HandoffLine,
    HandoffStatus,
    Launch,
    Meet,
    Met,
    PeerLine,
)
from ess.errors import BadInput, EssError, Unavailable
from ess.models.weights.fingerprint import fingerprint
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal
from ess.transfer.nixl import NixlTransport
from ess.transfer.tcp import TcpTransport
from ess.transfer.transport import Transport

EPOCH_BITS: Final = 63
ADDRESSES_MAX: Final = 1024


def open_port(launch: Launch, offload: Offload, clock: Clock) -> Port | None:
    """None for a worker that has no secret: it hands nothing over."""
    config = launch.config
    if not launch.secret:
        if config.role != "both":
            raise BadInput(f"role is {config.role!r}: its workers need a secret, and there is none")
        return None
    seal = Seal(launch.secret.encode())
    identity = Identity(
        epoch=1 + secrets.randbelow((1 << EPOCH_BITS) - 1),
        seal=seal,
        layout=_layout_digest(launch, offload),
    )
    return Port(
        offload,
        _transport(launch, identity, clock),
        seal,
        clock=clock,
        wait_s=config.handoff_wait_s,
        lease_s=config.handoff_lease_s,
    )


def _transport(launch: Launch, identity: Identity, clock: Clock) -> Transport:
    config = launch.config
    match config.transport:
        case "tcp":
            host, port = config.transfer_host, config.transfer_port
            return TcpTransport(identity, host=host, port=port, clock=clock)
        case "nixl":
            return NixlTransport(identity, clock=clock)
        case "shared":
            raise Unavailable(
                "transport is 'shared': an engine's host pool is not in shared memory yet; take "
                "'tcp' or 'nixl'"
            )


def _layout_digest(launch: Launch, offload: Offload) -> bytes:
    """Equal where rows of one worker mean the same to another."""
    layout = repr(offload.layout).encode() + launch.config.form.encode()
    return hashlib.blake2b(layout + fingerprint(launch.model), digest_size=32).digest()


class Peers:
    """Whom we have met, by the address at which their server is reached."""

    def __init__(self, port: Port | None) -> None:
        self._port = port
        self._epochs: dict[str, int] = {}

    @property
    def metadata(self) -> bytes:
        return b"" if self._port is None else self._port.metadata()

    def meet(self, message: Meet) -> Met:
        if self._port is None:
            why = "this engine takes part in no handoffs"
            return Met(message.address, 0, sentence=why, front=message.front)
        try:
            epoch = self._port.meet(message.metadata)
        except EssError as error:
            return Met(message.address, 0, sentence=str(error), front=message.front)
        self._epochs.pop(message.address, None)
        if len(self._epochs) == ADDRESSES_MAX:
            del self._epochs[next(iter(self._epochs))]
        self._epochs[message.address] = epoch
        return Met(message.address, epoch, self.metadata, front=message.front)

    def status(self, ended: Iterable[Ended]) -> HandoffStatus | None:
        """None for a worker that hands nothing over."""
        if self._port is None:
            return None
        stats = self._port.stats()
        lines = tuple(map(_line, ended))
        return HandoffStatus(
            open_arrival_count=len(self._port.receiver),
            open_departure_count=len(self._port.sender),
            landed_count=stats.landed,
            missed_count=stats.missed,
            sent_count=stats.sent,
            lapsed_count=stats.lapsed,
            received_bytes=stats.received_bytes,
            sent_bytes=stats.sent_bytes,
            again_count=stats.again_count,
            refused_count=stats.refused,
            peers=self._peer_lines(),
            recent=lines[::-1],
        )

    def _peer_lines(self) -> tuple[PeerLine, ...]:
        """Who is met under several addresses has a line for each."""
        assert self._port is not None, "a worker without a port has peers"
        heard_s = {peer.epoch: peer.heard_s_ago for peer in self._port.peers()}
        return tuple(
            PeerLine(address, epoch, epoch in heard_s, heard_s.get(epoch, 0.0))
            for address, epoch in self._epochs.items()
        )


def _line(ended: Ended) -> HandoffLine:
    at_s, outcome = ended
    match outcome:
        case Landed(uid, _, marks):
            return HandoffLine(uid, "take", "landed", marks, began_s=_began_s(at_s, marks))
        case Missed(uid, sentence, marks):
            return HandoffLine(uid, "take", "missed", marks, sentence, _began_s(at_s, marks))
        case Sent(uid, timeline):
            return HandoffLine(uid, "give", "sent", _marks(timeline), began_s=timeline.offered_s)
        case Lapsed(uid, _, sentence, timeline):
            marks = _marks(timeline)
            return HandoffLine(uid, "give", "lapsed", marks, sentence, timeline.offered_s)


def _began_s(at_s: float, marks: Marks) -> float:
    """The last mark was made just before the outcome was told of."""
    return at_s - max((mark_s for _, mark_s in marks), default=0.0)


def _marks(timeline: Timeline) -> Marks:
    """Moments since the offer; those that never came are left out."""
    moments = {field.name: getattr(timeline, field.name) for field in fields(timeline)}
    return tuple(
        (name.removesuffix("_s"), at_s - timeline.offered_s)
        for name, at_s in moments.items()
        if at_s is not None
    )
