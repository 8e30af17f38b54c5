"""All handoffs of a worker, in both directions, behind one transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ess.clock import Clock
from ess.door.handoff.endings import HandoffCounts
from ess.door.handoff.geometry import Ground
from ess.door.handoff.incoming.receiver import Receiver
from ess.door.handoff.outgoing.sender import Sender
from ess.door.offload import Offload
from ess.errors import BadInput
from ess.transfer.mail import Mail
from ess.transfer.members import Member, joined, members_of
from ess.transfer.messages import (
    Again,
    Count,
    Message,
    Piece,
    Reason,
    Refused,
    Release,
    Reserved,
    Seal,
)
from ess.transfer.transport import (
    Completed,
    Event,
    Failed,
    Notification,
    PeerLost,
    Transport,
)

PEERS_MAX: Final = 1024
RELEASED_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class PeerLine:
    """A worker that has been met, or the lead of several, and how long ago the most silent of them
    gave a sign of life."""

    epoch: int
    heard_s_ago: float


class Port:
    """Owns the transport. Everything happens inside `pump`, which waits for nothing: the thread of
    the offload calls it between layers and between steps, and then asks both for `outcomes`."""

    def __init__(
        self,
        offload: Offload,
        transport: Transport,
        seal: Seal,
        *,
        clock: Clock,
        wait_s: float = 30.0,
        lease_s: float = 30.0,
        arrivals_max: int = 64,
        ground: Ground | None = None,
        defers: bool = False,
    ) -> None:
        self._mail = mail = Mail(transport=transport, seal=seal, clock=clock, wait_s=wait_s)
        self.counts = counts = HandoffCounts()
        self.receiver = Receiver(
            offload, mail, counts, arrivals_max=arrivals_max, ground=ground, defers=defers
        )
        longest = offload.sizes.length_max
        self.sender = Sender(offload.layout, mail, counts, length_max=longest, lease_s=lease_s)
        self._transport = transport
        self._heard_s: dict[int, float] = {}
        self._released: dict[tuple[int, int], None] = {}
        self._is_open = True

    @property
    def now_s(self) -> float:
        """The time of the clock by which handoffs begin and end."""
        return self._mail.now_s()

    @property
    def epoch(self) -> int:
        return self._transport.epoch

    def metadata(self, stages: Sequence[tuple[bytes, range]] = ()) -> bytes:
        """What another worker needs to `meet` this worker: sealed, to be sent by any way. With
        `stages` it meets a group whose lead this worker is: `stages` has the metadata of each stage
        and its layers of the whole model, MTP layers included; the stage of this worker comes
        first."""
        return joined(self._mail.seal, stages) if stages else self._transport.metadata()

    def meet(self, metadata: bytes) -> int:
        """The epoch of the peer, or of the lead of several. Both sides meet each other; meeting
        again only restores lost connections. BadInput where the metadata is not of our peers, or
        they do not have each layer once."""
        members = members_of(self._mail.seal, metadata)
        origins = self.receiver.origins.of(members)
        fresh = [each for each in members if each.epoch not in self._heard_s]
        if len(self._heard_s) + len(fresh) > PEERS_MAX:
            raise BadInput(f"{len(self._heard_s)} peers are met, at most {PEERS_MAX}")
        self._connect(members)
        now_s = self._mail.now_s()
        self._heard_s |= {member.epoch: now_s for member in members}
        self.receiver.origins.met(origins)
        return members[0].epoch

    def _connect(self, members: Sequence[Member]) -> None:
        """Connects to all members; where one cannot be reached, to none of the new ones."""
        for count, member in enumerate(members):
            try:
                self._transport.connect(member.metadata)
            except BadInput:
                for each in members[:count]:
                    if each.epoch not in self._heard_s:
                        self._transport.disconnect(each.epoch)
                raise

    def pump(self) -> None:
        for event in self._transport.poll():
            self._handle(event)
        self.receiver.expire()
        self.sender.expire()
        self._answer()

    @property
    def is_busy(self) -> bool:
        """Whether handoffs are under way; `pump` moves them on."""
        return len(self.receiver) + len(self.sender) > 0

    def peers(self) -> list[PeerLine]:
        now_s = self._mail.now_s()
        return [
            PeerLine(lead, now_s - min(self._heard_s[origin.peer] for origin in group))
            for lead, group in self.receiver.origins.leads().items()
        ]

    def close(self) -> None:
        """Ends all handoffs; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._transport.close()
            self.receiver.close()
            self.sender.close()

    def check(self) -> None:
        self.receiver.check()
        self.sender.check()
        assert len(self._heard_s) <= PEERS_MAX, f"{len(self._heard_s)} peers"
        lost = [peer for peer in self._heard_s if not self.receiver.origins.knows(peer)]
        assert not lost, f"peers {lost} are lost, and counted among those that are met"
        assert len(self._released) <= RELEASED_MAX, f"{len(self._released)} releases"

    def _handle(self, event: Event) -> None:
        match event:
            case Completed(handle):
                self.sender.completed(handle)
            case Failed(handle, reason):
                self.sender.failed(handle, reason)
            case Notification(peer, content):
                self._read(peer, content)
            case PeerLost(peer, reason):
                self._heard_s.pop(peer, None)
                self._released = {key: None for key in self._released if key[0] != peer}
                self.receiver.peer_lost(peer, reason)
                self.sender.peer_lost(peer)

    def _read(self, peer: int, content: bytes) -> None:
        """A message counts when it is sealed, and its peer sent it, to this boot of this worker."""
        try:
            envelope = self._mail.seal.opened(content)
            if (envelope.sender, envelope.receiver) != (peer, self.epoch):
                raise BadInput(f"a message of {envelope.sender:016x} comes from {peer:016x}")
        except BadInput:
            self.counts.refused_count += 1
            return
        if peer in self._heard_s:
            self._heard_s[peer] = self._mail.now_s()
        self._pass_on(envelope.message, peer)

    def _pass_on(self, message: Message, peer: int) -> None:
        match message:
            case Piece() | Count() | Refused():
                self.receiver.take(message, peer=peer)
            case Reserved() | Again():
                self.sender.take(message, peer=peer)
            case Release(uid) if self.receiver.knows(uid, peer=peer):
                self.receiver.take(message, peer=peer)
            case Release(uid, reason) if reason is not Reason.SETTLED:
                self.sender.take(message, peer=peer)
                if len(self._released) < RELEASED_MAX and not self._transport.guards:
                    self._released[peer, uid] = None

    def _answer(self) -> None:
        """Tells each peer that has ended a handoff when none of our transfers may touch its pages
        any more. The peer repeats its question until it gets this answer."""
        for peer, uid in list(self._released):
            if not self.sender.is_underway(uid, peer=peer):
                del self._released[peer, uid]
                self._mail.post(Release(uid, Reason.SETTLED), peer)
