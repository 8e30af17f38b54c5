"""The sender of handoffs: pages of a layer leave as they are made, to where they are awaited.

    offer --> made, made, ... --> finish --> Release(DONE): Sent
      `-- Reserved comes at any time --'       `--> lease, lost peer, given up: Lapsed

What was made before the receiver's Reserved came leaves at once, in few big transfers; after that a
layer's full pages leave as it is made, and the last, partial page when the prompt is. Each transfer
carries a sealed Piece with the checksum of its bytes as they were when it was posted (`transfers`).

What is kept beside the rows is last: it is whole when the prompt is, and lies on the host from then
on; of it only what is under way is copied.

`finish` takes the sequence: it gives up its device pages at once, and its host pages when the
receiver has released it, or it is over for another reason and nothing of it is under way any more.
Before that the sequence is its engine's, which also closes it if the handoff is given up.

The lease begins anew whenever more has been sent than ever before: a slow network does not end a
handoff that goes on, and a receiver that asks for the same again and again does not keep it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import ExitStack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ess.door.handoff import geometry
from ess.door.handoff.endings import HandoffCounts, Lapsed, Sent
from ess.door.handoff.outgoing.departure import Departure, Target
from ess.door.handoff.outgoing.orphans import Orphans
from ess.door.handoff.outgoing.pages import Pages, SequencePages
from ess.door.handoff.outgoing.transfers import Transfers
from ess.door.handoff.outgoing.units import PART_BYTES_MAX
from ess.door.sequences.sequence import Sequence
from ess.errors import BadInput, PoolFull
from ess.layout import ModelLayout
from ess.transfer.mail import Mail
from ess.transfer.messages import (
    Again,
    Count,
    Message,
    Reason,
    Refused,
    Release,
    Reserved,
)
from ess.transfer.windows import packed_windows

DEPARTURES_MAX: Final = 4096
LOOK_S: Final = 0.05
TELL_S: Final = 1.0


class Sender:
    """Hands over prompts of at most `length_max` tokens, whose rows lie as the layout says."""

    def __init__(
        self,
        layout: ModelLayout,
        mail: Mail,
        counts: HandoffCounts,
        *,
        length_max: int,
        lease_s: float = 30.0,
    ) -> None:
        self._layout = layout
        self._mail = mail
        self._lease_s = lease_s
        self._open: dict[int, Departure] = {}
        self._ended: set[Departure] = set()
        self._orphans = Orphans(wait_s=mail.wait_s)
        self._looked_s = float("-inf")
        self._counts = counts
        self._outcomes: list[Sent | Lapsed] = []
        self._transfers = Transfers(
            mail,
            counts,
            place_bytes=max(
                geometry.window_bytes(layout, layout.group_count, length_max),
                min(layout.request_state_bytes(length_max), PART_BYTES_MAX),
            ),
        )

    def __len__(self) -> int:
        """Handoffs that are not over, and those that are over while their pages are being read."""
        return len(self._open) + len(self._ended)

    # ---- what the engine says

    def offer(self, uid: int, sequence: Sequence, *, prompt: Many[int], salt: bytes) -> None:
        """The request is admitted; its cached pages are made. PoolFull when too many are open."""
        pages = SequencePages(sequence, token_count=len(prompt) - 1)
        self.offer_pages(uid, pages, prompt=prompt, salt=salt)

    def offer_pages(self, uid: int, pages: Pages, *, prompt: Many[int], salt: bytes) -> None:
        """Offers pages that belong to no sequence. Where it raises, no handoff is open."""
        if uid in self._open:
            raise BadInput(f"handoff {uid} is open already")
        if len(self) >= DEPARTURES_MAX:
            raise PoolFull(
                limiter="handoffs",
                needed=1,
                free=0,
                sentence=f"all {DEPARTURES_MAX} handoffs are open; wait until one has ended",
            )
        now_s = self._mail.now_s()
        departure = Departure.of(uid, pages, prompt=prompt, salt=salt, now_s=now_s)
        with ExitStack() as undo:
            undo.callback(self._withdraw, departure)
            self._open[uid] = departure
            target = self._orphans.adopt(uid)
            if target is not None:
                self._aim(departure, target)
            undo.pop_all()

    def made(self, uid: int, layer: int, stop: int) -> None:
        """Rows and keys of the tokens before `stop` are stored in this layer. Does nothing if the
        handoff is over, so that the engine need not know."""
        departure = self._open.get(uid)
        if departure is None or departure.ending is not None:
            return
        departure.make(range(layer, layer + 1), stop)
        self._go_on(departure)

    def finish(self, uid: int, windows: NDArray[np.int32] | None) -> None:
        """The prompt is made: takes the sequence over. `windows` [groups, w, k] or None."""
        departure = self._open.get(uid)
        assert departure is not None, f"handoff {uid} is not open"
        assert not departure.is_made, f"handoff {uid} is finished twice"
        state = departure.pages.keep()
        if windows is None:
            windows = np.empty((self._layout.group_count, 0, 0), np.int32)
        now_s = self._mail.now_s()
        packed = packed_windows(windows, self._layout.rows_of(departure.token_count))
        departure.make_all(packed, state, now_s=now_s)
        self._extend(departure)
        if departure.ending is None:
            self._go_on(departure)
        else:
            self._retire(departure)

    def give_up(self, uid: int, reason: Reason = Reason.ABORTED) -> None:
        """Before `finish` the sequence is its engine's to close; after it, it is closed here as
        soon as nothing reads its pages."""
        departure = self._open.get(uid)
        if departure is None:
            return
        self._end(departure, reason, f"given up: {reason.name}", tell=True)
        if not departure.is_made:
            del self._open[uid]

    def is_underway(self, uid: int, *, peer: int) -> bool:
        """A transfer of this handoff may still touch the peer's pages."""
        return self._transfers.is_underway(uid, peer=peer)

    def outcomes(self) -> list[Sent | Lapsed]:
        """The departures that have ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # ---- what a peer says

    def take(self, message: Message, *, peer: int) -> None:
        match message:
            case Reserved():
                self._reserved(message, peer)
            case Again():
                self._again(message, peer)
            case Release():
                self._released(message, peer)

    def _reserved(self, message: Reserved, peer: int) -> None:
        target = Target.of(message, peer=peer, now_s=self._mail.now_s())
        departure = self._open.get(message.uid)
        if departure is None or departure.ending is not None:
            fault = self._orphans.keep(message.uid, target)
            if fault is not None:
                self._refuse(message.uid, peer, fault)
        elif departure.target is None:
            self._aim(departure, target)
        elif departure.target.equals(target):
            self._tell_count(departure)
        else:
            self._refuse(message.uid, peer, Reason.DUPLICATE)

    def _aim(self, departure: Departure, target: Target) -> None:
        fault = departure.fault_of(target)
        if fault is not None:
            self._refuse(departure.uid, target.peer, fault)
            return
        departure.aim(target)
        self._extend(departure)
        self._tell_count(departure)
        self._go_on(departure)

    def _go_on(self, departure: Departure) -> None:
        """Further units may leave, if the receiver has sent its addresses."""
        if departure.target is not None:
            self._transfers.go_on(departure)

    def _again(self, message: Again, peer: int) -> None:
        departure = self._of_peer(message.uid, peer)
        if departure is None or message.kind not in departure.units:
            return
        departure.units[message.kind].again(departure.asked(message))
        self._go_on(departure)

    def _released(self, message: Release, peer: int) -> None:
        self._orphans.released(message.uid, peer)
        departure = self._of_peer(message.uid, peer)
        if departure is not None:
            is_done = message.reason is Reason.DONE and departure.is_made
            ending = Reason.DONE if is_done else Reason.ABORTED
            sentence = f"the receiver gave it up: {message.reason.name}"
            self._end(departure, ending, sentence, tell=False)

    def _of_peer(self, uid: int, peer: int) -> Departure | None:
        """None unless the handoff goes to this peer: messages of other peers change nothing and get
        no answer."""
        departure = self._open.get(uid)
        if departure is None or departure.target is None or departure.ending is not None:
            return None
        return departure if departure.target.peer == peer else None

    # ---- what the transport says

    def completed(self, handle: int) -> None:
        departure = self._transfers.completed(handle)
        if departure is None:
            return
        if departure.sent_count > departure.sent_most:
            departure.sent_most = departure.sent_count
            self._extend(departure)
        self._settle(departure)

    def failed(self, handle: int, reason: str) -> None:
        """A transfer has failed; it is posted again after a pause."""
        departure = self._transfers.failed(handle, reason)
        if departure is not None:
            self._settle(departure)

    def peer_lost(self, peer: int) -> None:
        """Its transfers have failed: the transport says so before it says that the peer is lost."""
        self._orphans.lost(peer)
        for departure in list(self._open.values()):
            if self._of_peer(departure.uid, peer) is not None:
                self._end(departure, Reason.ABORTED, f"peer {peer:016x} is lost", tell=False)
        for handle in self._transfers.lost(peer):
            self.failed(handle, "its peer is lost")

    def _settle(self, departure: Departure) -> None:
        """A transfer of it has ended, and its peer has room for another."""
        if departure.ending is None:
            self._transfers.go_on(departure)
        else:
            self._retire(departure)
            self._transfers.push(departure.peer)

    # ---- time

    def _extend(self, departure: Departure) -> None:
        """The lease begins when the prompt is made; before that its engine answers for it."""
        if departure.is_made:
            departure.deadline_s = self._mail.now_s() + self._lease_s

    def expire(self) -> None:
        """Handles everything that is due: leases, Reserved without a request, signs of life, pauses
        that are over."""
        now_s = self._mail.now_s()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for departure in list(self._open.values()):
            if departure.ending is not None:
                continue
            if departure.deadline_s <= now_s:
                self._end(departure, Reason.DEADLINE, self._lapse(departure), tell=True)
            elif departure.target is not None and now_s - departure.told_s >= TELL_S:
                self._tell_count(departure)
        for uid, peer in self._orphans.expired(now_s):
            self._refuse(uid, peer, Reason.UNKNOWN)
        self._transfers.push_all()

    def _lapse(self, departure: Departure) -> str:
        sentence = f"nothing more was sent for {self._lease_s} s behind its prompt"
        if departure.target is None:
            return f"{sentence}: no receiver has asked for it"
        counted = f"{departure.sent_count} of {departure.wanted_count} pages of a layer sent"
        return f"{sentence}: {counted}{f', {departure.fault}' if departure.fault else ''}"

    # ---- words to a peer

    def _tell_count(self, departure: Departure) -> None:
        departure.told_s = self._mail.now_s()
        count = Count(departure.uid, departure.posted_count, departure.wanted_count)
        self._mail.post(count, departure.peer)

    def _refuse(self, uid: int, peer: int, reason: Reason) -> None:
        self._counts.refused_count += 1
        retry_ms = 1000 if reason is Reason.FULL else 0
        self._mail.post(Refused(uid, reason, retry_ms), peer)

    # ---- the end

    def _end(self, departure: Departure, reason: Reason, sentence: str, *, tell: bool) -> None:
        if departure.ending is not None:
            return
        timeline = departure.timeline(self._mail.now_s())
        if reason is Reason.DONE:
            self._outcomes.append(Sent(departure.uid, timeline))
            self._counts.sent_count += 1
        else:
            self._outcomes.append(Lapsed(departure.uid, reason, sentence, timeline))
            self._counts.lapsed_count += 1
        self._stop(departure, reason, tell=tell)

    def _withdraw(self, departure: Departure) -> None:
        """The offer was broken off: the handoff did not begin, and its end is not told."""
        self._open.pop(departure.uid, None)
        self._stop(departure, Reason.ABORTED, tell=True)

    def _stop(self, departure: Departure, reason: Reason, *, tell: bool) -> None:
        departure.ending = reason
        if departure.target is not None:
            self._transfers.stop(departure)
            if tell:
                self._mail.post(Release(departure.uid, reason), departure.peer)
        self._retire(departure)

    def _retire(self, departure: Departure) -> None:
        """It is over. Once the prompt is made its uid is free, and its sequence is closed as soon
        as nothing reads its pages any more."""
        if not departure.is_made:
            return
        if self._open.get(departure.uid) is departure:
            del self._open[departure.uid]
        if departure.underway_count:
            self._ended.add(departure)
            return
        self._ended.discard(departure)
        departure.pages.close()

    def close(self) -> None:
        """Gives everything up without a word. The transport must move nothing after this."""
        for departure in list(self._open.values()):
            self._end(departure, Reason.ABORTED, "this worker ends", tell=False)
        for departure in self._transfers.abandon():
            self._retire(departure)
        self._open.clear()

    def check(self) -> None:
        for uid, departure in self._open.items():
            assert departure.uid == uid, f"handoff {departure.uid} stands under {uid}"
            assert departure.ending is None or not departure.is_made, f"{uid} is over and kept"
        departures = [*self._open.values(), *self._ended]
        for departure in departures:
            departure.check()
        assert all(departure.underway_count for departure in self._ended), "kept without a reason"
        self._transfers.check(departures)
        self._orphans.check()
