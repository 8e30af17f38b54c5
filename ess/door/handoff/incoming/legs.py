"""The legs of handoffs, one for each worker that brings a part: counted, asked for, and settled.

    begin --> all has come --> whole
      `--> refused, silent, its peer lost, ended by us --> over

A leg is whole when every unit that was reserved for has been read where it lies and has its
checksum; no message says so. A worker that writes into layers of another worker may have spoilt
them, and its leg is missed.

When may the pages be used for something else, and when are checked pages final? Where the transport
guards, once the ticket is taken back and no payload was under way. Where it does not, bytes that a
peer has begun to send may land at any time. So the receiver sends Release and lets the pages rest
until the peer has answered that it is SETTLED, or is lost. Only then the leg is over.

A message may be lost. What has not been answered is said again, less and less often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ess.door.handoff.endings import HandoffCounts
from ess.door.handoff.incoming.leg import NAG_S, NAG_S_MAX, Leg
from ess.door.handoff.incoming.origins import Origin
from ess.errors import BadInput, BadState
from ess.transfer.arrivals import Arrivals, Share, Verdict
from ess.transfer.mail import Mail
from ess.transfer.messages import (
    Count,
    Message,
    Piece,
    Reason,
    Refused,
    Release,
    Reserved,
)

AGAINS_MAX: Final = 64
STRAYS_MAX: Final = 256


class Legs:
    """`read` gives the bytes of a piece where they lie. `accept` is asked when all of a leg is
    there; it raises BadInput or BadState if that is of no use."""

    def __init__(
        self,
        mail: Mail,
        counts: HandoffCounts,
        *,
        legs_max: int,
        read: Callable[[Leg, Piece], list[memoryview]],
        accept: Callable[[Leg], None],
        knows: Callable[[int], bool],
    ) -> None:
        self._counts = counts
        self._mail = mail
        self._transport = mail.transport
        self._read = read
        self._accept = accept
        self._knows = knows
        self._arrivals = Arrivals(clock=mail.clock, handoffs_max=legs_max)
        self._open: dict[tuple[int, int], Leg] = {}
        self._over: list[Leg] = []
        self._strays: dict[tuple[int, int], None] = {}

    # ---- what the owner of the handoffs does

    def begin(self, origin: Origin, room: Reserved, shares: Sequence[Share]) -> Leg:
        """Tells the peer of the room for what it brings."""
        uid, peer = room.uid, origin.peer
        fault = self._arrivals.expect(
            uid=uid, sender=peer, shares=shares, within_s=self._mail.wait_s
        )
        arrival = self._arrivals.find(uid, sender=peer)
        assert fault is None, f"handoff {uid} was checked: {fault}"
        assert arrival is not None, f"handoff {uid} is not expected"
        leg = Leg(origin, room, arrival, nag_s=self._mail.now_s() + NAG_S)
        self._open[uid, peer] = leg
        self._transport.allow(room.ticket)
        self._mail.post(room, peer)
        return leg

    def end(self, leg: Leg, reason: Reason) -> None:
        """The leg is not wanted any more: it is over now, or when the peer has answered."""
        self._arrivals.close(leg.uid, sender=leg.peer)
        self._transport.forbid(leg.room.ticket)
        if self._transport.guards:
            self._remove(leg, told=reason)
            return
        leg.ending = reason
        leg.moved(self._mail.now_s())
        self._mail.post(Release(leg.uid, reason), leg.peer)

    def over(self) -> list[Leg]:
        """The legs that are over since the last call."""
        ended, self._over = self._over, []
        return ended

    def has(self, uid: int, *, peer: int) -> bool:
        return (uid, peer) in self._open

    # ---- what the port tells

    def take(self, message: Message, *, peer: int) -> None:
        """A message that this peer has sent. For unknown handoffs only a count is kept, and the
        peer is answered that the handoff is unknown."""
        match message:
            case Piece():
                self._take_piece(message, peer)
            case Count():
                self._take_count(message, peer)
            case Refused():
                self._take_refused(message, peer)
            case Release():
                self._take_release(message, peer)

    def peer_lost(self, peer: int, reason: str) -> None:
        """Ends all legs of a peer: none of its bytes land any more."""
        for leg in [leg for leg in self._open.values() if leg.peer == peer]:
            if leg.ending is Reason.DONE:
                self._settled(leg)
                continue
            if leg.ending is None:
                leg.sentence = f"peer {peer:016x} is lost: {reason}"
            self._remove(leg)

    def expire(self) -> None:
        """Ends legs that were silent for too long and repeats messages that were lost. A complete
        leg is whole if nothing more can land on its pages."""
        for arrival in self._arrivals.expired():
            leg = self._open[arrival.uid, arrival.sender]
            self._miss(leg, Reason.DEADLINE, f"nothing new for {self._mail.wait_s:g} s")
        now_s = self._mail.now_s()
        for leg in list(self._open.values()):
            if leg.ending is None and leg.arrival.is_complete:
                self._complete(leg, now_s)
            elif now_s >= leg.nag_s:
                self._nag(leg, now_s)
        for peer, uid in self._strays:
            if (uid, peer) not in self._open:
                self._mail.post(Release(uid, Reason.UNKNOWN), peer)
        self._strays.clear()

    def close(self) -> None:
        """The transport is closed: what has not come will not."""
        for leg in list(self._open.values()):
            if leg.ending is None:
                leg.sentence = "the port was closed"
            self._remove(leg)

    def check(self) -> None:
        self._arrivals.check()
        for key, leg in self._open.items():
            assert key == (leg.uid, leg.peer), f"handoff {leg.uid} is listed as {key}"
            assert not leg.is_over, f"handoff {leg.uid}: a leg is over and open"
            counted = self._arrivals.find(leg.uid, sender=leg.peer)
            assert (counted is leg.arrival) == leg.is_counted, f"{leg.uid} ends: {leg.ending}"
        assert len(self._arrivals) <= len(self._open), "a count without a leg"
        assert len(self._strays) <= STRAYS_MAX, f"{len(self._strays)} strays"
        assert not self._over, f"the receiver was not told of {len(self._over)} legs"

    # ---- what comes

    def _take_piece(self, piece: Piece, peer: int) -> None:
        leg = self._open.get((piece.uid, peer))

        def read(piece: Piece) -> list[memoryview]:
            assert leg is not None, f"{piece} is counted without a leg"
            return self._read(leg, piece)

        verdict = self._arrivals.take(piece, sender=peer, read=read)
        self._counts.refused_count += verdict not in (Verdict.TAKEN, Verdict.DUPLICATE)
        if leg is None:
            return
        if verdict is Verdict.TAKEN:
            self._taken(leg, piece)
        elif verdict is Verdict.CORRUPT and leg.ending is None:
            self._transport.allow(leg.room.ticket)
        elif verdict is Verdict.OUTSIDE and leg.is_counted and not leg.origin.has(piece):
            named = f"layers {piece.layer_begin}..{piece.layer_end - 1} of {piece.kind.name}"
            self._miss(leg, Reason.ABORTED, f"{named}, which another worker has,")

    def _taken(self, leg: Leg, piece: Piece) -> None:
        now_s = self._mail.now_s()
        self._counts.received_bytes += piece.byte_count
        leg.is_answered = True
        leg.mark("first piece", now_s)
        leg.moved(now_s)

    def _take_count(self, count: Count, peer: int) -> None:
        leg = self._open.get((count.uid, peer))
        if leg is None:
            if len(self._strays) < STRAYS_MAX and self._knows(peer):
                self._strays[peer, count.uid] = None
            return
        self._arrivals.heard(count.uid, sender=peer)
        leg.posted_count = count.arrived
        if not leg.is_answered:
            leg.is_answered = True
            now_s = self._mail.now_s()
            leg.mark("answered", now_s)
            leg.moved(now_s)

    def _take_refused(self, refused: Refused, peer: int) -> None:
        leg = self._open.get((refused.uid, peer))
        if leg is None or leg.ending is not None:
            return
        if refused.reason is Reason.FULL:
            leg.nag_s = self._mail.now_s() + min(refused.retry_ms / 1000, NAG_S_MAX)
            leg.is_to_repeat = True
            return
        leg.sentence = f"peer {peer:016x} refuses it: {_words(refused.reason)}"
        self._remove(leg)

    def _take_release(self, release: Release, peer: int) -> None:
        leg = self._open.get((release.uid, peer))
        if leg is None:
            return
        if release.reason is not Reason.SETTLED:
            if leg.ending is None:
                self._miss(leg, Reason.ABORTED, f"given up ({_words(release.reason)})")
        elif leg.ending is Reason.DONE:
            self._settled(leg)
        elif leg.ending is not None:
            self._remove(leg)

    def _settled(self, leg: Leg) -> None:
        """A late second copy may have written over checked pages: then the rows are missed."""
        if not leg.arrival.is_complete:
            leg.sentence = f"a late copy from peer {leg.peer:016x} was corrupt"
            self._remove(leg)
            return
        self._end_whole(leg)

    # ---- a leg ends

    def _complete(self, leg: Leg, now_s: float) -> None:
        """All is there and checked. It is final once nothing more can land on it.

        A second copy of a unit may be on its way into memory that has been checked. What came
        whole has its own message and is checked like the first; what came in part is waited for.
        """
        leg.mark("complete", now_s)
        if not self._transport.guards:
            leg.ending = Reason.DONE
            leg.moved(now_s)
            self._mail.post(Release(leg.uid, Reason.DONE), leg.peer)
            return
        if self._transport.is_landing(leg.room.ticket):
            return
        self._transport.forbid(leg.room.ticket)
        if not self._transport.is_landing(leg.room.ticket):
            self._end_whole(leg)

    def _end_whole(self, leg: Leg) -> None:
        try:
            self._accept(leg)
        except (BadInput, BadState) as wrong:
            leg.sentence = f"all rows came, but {wrong}"
            self._remove(leg, told=Reason.ABORTED)
            return
        leg.is_whole = True
        self._remove(leg, told=Reason.DONE)

    def _miss(self, leg: Leg, reason: Reason, sentence: str) -> None:
        count = leg.arrival.count
        progress = f"{count.arrived} of {count.wanted} pages of a layer had come"
        leg.sentence = f"{sentence} from peer {leg.peer:016x}: {progress}"
        self.end(leg, reason)

    def _remove(self, leg: Leg, *, told: Reason | None = None) -> None:
        """Forgets a leg: none of its bytes land any more."""
        self._arrivals.close(leg.uid, sender=leg.peer)
        self._transport.forbid(leg.room.ticket)
        del self._open[leg.uid, leg.peer]
        leg.is_over = True
        self._over.append(leg)
        if told is not None:
            self._mail.post(Release(leg.uid, told), leg.peer)

    # ---- what is said

    def _nag(self, leg: Leg, now_s: float) -> None:
        """Repeats messages that were not answered, or asks again for units that were sent and have
        not come."""
        is_patient = leg.nagged(now_s)
        if leg.ending is not None:
            self._mail.post(Release(leg.uid, leg.ending), leg.peer)
        elif not leg.is_answered:
            self._repeat_room(leg)
        elif not is_patient or leg.posted_count > leg.arrival.count.arrived:
            self._ask(leg)

    def _repeat_room(self, leg: Leg) -> None:
        """Where tickets do not guard the pages no second Reserved may be under way: the peer could
        read it after the Release and obey it."""
        if self._transport.guards or leg.is_to_repeat:
            leg.is_to_repeat = False
            self._mail.post(leg.room, leg.peer)

    def _ask(self, leg: Leg) -> None:
        for _, again in zip(range(AGAINS_MAX), leg.arrival.missing(), strict=False):
            self._counts.again_count += 1
            self._mail.post(again, leg.peer)


def _words(reason: Reason) -> str:
    return reason.name.lower().replace("_", " ")
