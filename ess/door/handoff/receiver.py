"""Room for prompts whose rows are made elsewhere, and the count of what has come of each.

    expect --> open --> all has come --> landed
                `--> given up, refused, silent, its peer lost --> missed

A handoff lands when every unit that was reserved for has been read where it lies and has its
checksum; no message says so. Until then nothing in the pool is marked, so nobody reads a page of
it, and a page cannot become anything else: the receiver holds it beside its sequence, whatever
happens to that.

When may the pages be used for something else, and when are checked pages final? Where the transport
guards, once the ticket is taken back and no payload was under way. Where it does not, bytes that a
peer has begun to send may land at any time. So the receiver sends Release and lets the pages rest
until the peer has answered that it is SETTLED, or is lost. Only then an outcome is told.

A message may be lost. What has not been answered is said again, less and less often.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ess.clock import Clock
from ess.door.checks import in_range
from ess.door.handoff.arriving import NAG_S, NAG_S_MAX, Arriving
from ess.door.handoff.endings import Landed, Missed
from ess.door.handoff.geometry import (
    WINDOWS,
    fresh_region,
    piece_runs,
    pool_regions,
    shares,
    window_slot_bytes,
)
from ess.door.offload import Offload
from ess.door.sequences.sequence import Sequence, require_state
from ess.errors import BadInput, BadState, PoolFull
from ess.pool.warmup import WindowSet
from ess.transfer.arrivals import Arrivals, Verdict
from ess.transfer.messages import (
    PAGES_MAX,
    UID_MAX,
    Count,
    Message,
    Piece,
    Reason,
    Refused,
    Release,
    Reserved,
    Seal,
    text_digest,
)
from ess.transfer.runs import views
from ess.transfer.transport import Transfer, Transport
from ess.transfer.windows import unpacked_windows
from ess.units import PAGE_ROWS, div_ceil

MESSAGE_S: Final = 10.0
AGAINS_MAX: Final = 64
STRAYS_MAX: Final = 256
HANDOFFS: Final = "handoffs"


class Receiver:
    """Handoffs to this worker, at most `arrivals_max` at once, those at rest included.

    It registers the host pool and `arrivals_max` slots for windows with the transport.
    """

    def __init__(
        self,
        offload: Offload,
        transport: Transport,
        seal: Seal,
        *,
        clock: Clock,
        wait_s: float,
        arrivals_max: int,
    ) -> None:
        if not 0 < wait_s < float("inf"):
            raise BadInput(f"wait_s is {wait_s}, must be a number of seconds above 0")
        in_range("arrivals_max", arrivals_max, 1, 4096)
        self.landed_count = 0
        self.missed_count = 0
        self.received_bytes = 0
        self.again_count = 0
        self._offload = offload
        self._pools = offload.owner.pools
        self._transport = transport
        self._seal = seal
        self._clock = clock
        self._wait_s = wait_s
        self._arrivals = Arrivals(clock=clock, handoffs_max=arrivals_max)
        self._arrivals_max = arrivals_max
        self._peers: set[int] = set()
        self._entries: dict[int, Arriving] = {}
        self._slot_bytes = window_slot_bytes(self._pools)
        self._free_slots = [slot * self._slot_bytes for slot in range(arrivals_max)][::-1]
        self._ticket = 0
        self._strays: dict[tuple[int, int], None] = {}
        self._outcomes: list[Landed | Missed] = []
        latent = self._pools.latent
        slots = fresh_region(WINDOWS, arrivals_max * self._slot_bytes, latent)
        listed = [*pool_regions(latent), slots]
        self._regions = {region.number: region for region in listed}
        transport.register(listed)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def refused_count(self) -> int:
        """Pieces that were not taken."""
        good = (Verdict.TAKEN, Verdict.DUPLICATE)
        counts = self._arrivals.verdicts.items()
        return sum(count for verdict, count in counts if verdict not in good)

    # ---- what the owner of the sequences does

    def expect(self, sequence: Sequence, *, uid: int, peer: int) -> Arriving:
        """Tells a peer that there is room for the rows of this sequence that are not cached.

        The sequence was opened with `on_device=False`, and nothing has been imported.
        """
        self._check_expected(sequence, uid, peer)
        now_s, room = self._clock.now_s(), self._room(sequence, uid)
        layout = self._pools.layout
        listed = shares(layout, first_page=room.first_page, token_count=room.token_count)
        refusal = self._arrivals.expect(uid=uid, sender=peer, shares=listed, within_s=self._wait_s)
        arrival = self._arrivals.find(uid, sender=peer)
        assert refusal is None, f"handoff {uid} was checked: {refusal}"
        assert arrival is not None, f"handoff {uid} is not expected"
        pages = np.array(room.pages, np.int32)
        entry = Arriving(peer, sequence, room, pages, arrival, now_s, nag_s=now_s + NAG_S)
        self._free_slots.pop()
        self._pools.latent.hold(pages)
        self._entries[uid] = entry
        self._transport.allow(room.ticket)
        self._say(room, peer)
        return entry

    def give_up(self, uid: int, reason: Reason = Reason.ABORTED) -> None:
        """The rows are not wanted any more; no outcome is told. The sequence is its owner's to
        close. A handoff that has ended already is none."""
        entry = self._entries.get(uid)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.uid != uid]
        if entry is None:
            return
        entry.sentence = ""
        if entry.ending in (None, Reason.DONE):
            self._end(entry, reason)

    def outcomes(self) -> list[Landed | Missed]:
        """What has ended since the last call."""
        ended, self._outcomes = self._outcomes, []
        return ended

    # ---- what the port tells

    def peer_met(self, peer: int) -> None:
        self._peers.add(peer)

    def knows(self, uid: int, *, peer: int) -> bool:
        entry = self._entries.get(uid)
        return entry is not None and entry.peer == peer

    def take(self, message: Message, *, peer: int) -> None:
        """A message that this peer has sent. Nothing is kept of unknown handoffs but their counts,
        of which the peer is told that they are unknown."""
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
        """Nothing of this peer lands any more."""
        self._peers.discard(peer)
        for entry in [entry for entry in self._entries.values() if entry.peer == peer]:
            if entry.ending is Reason.DONE:
                self._settled(entry)
                continue
            if entry.ending is None:
                entry.sentence = f"peer {peer:016x} is lost: {reason}"
            self._remove(entry)

    def expire(self) -> None:
        """Lands what is complete, ends what was silent for too long, says again what was lost."""
        for arrival in self._arrivals.expired():
            entry = self._entries[arrival.uid]
            self._miss(entry, Reason.DEADLINE, f"nothing new for {self._wait_s:g} s")
        now_s = self._clock.now_s()
        for entry in list(self._entries.values()):
            if entry.ending is None and entry.arrival.is_complete:
                self._complete(entry, now_s)
            elif now_s >= entry.nag_s:
                self._nag(entry, now_s)
        for peer, uid in self._strays:
            if uid not in self._entries:
                self._say(Release(uid, Reason.UNKNOWN), peer)
        self._strays.clear()

    def close(self) -> None:
        """The transport is closed: what has not landed will not."""
        for entry in list(self._entries.values()):
            if entry.ending is None:
                entry.sentence = "the port was closed"
            self._remove(entry)

    def check(self) -> None:
        self._arrivals.check()
        taken = [entry.room.window_at for entry in self._entries.values()]
        slots = sorted([*taken, *self._free_slots])
        assert slots == [slot * self._slot_bytes for slot in range(self._arrivals_max)], slots
        for uid, entry in self._entries.items():
            assert uid == entry.uid, f"handoff {entry.uid} is listed as {uid}"
            counted = self._arrivals.find(uid, sender=entry.peer)
            is_open = entry.ending in (None, Reason.DONE)
            assert (counted is entry.arrival) == is_open, f"handoff {uid} ends: {entry.ending}"
            pages, latent = entry.pages, self._pools.latent
            assert all(latent.pages.hold_count(page) > 0 for page in pages.tolist()), uid
            assert not latent.stored[:, pages].any(), f"handoff {uid}: stored"
        assert len(self._arrivals) <= len(self._entries), "a count without a handoff"
        assert len(self._strays) <= STRAYS_MAX, f"{len(self._strays)} strays"

    # ---- a handoff begins

    def _check_expected(self, sequence: Sequence, uid: int, peer: int) -> None:
        in_range("uid", uid, 0, UID_MAX)
        self._offload.owner.own([sequence])
        require_state(sequence, "preempted")
        if sequence.arrival_count or sequence.length != sequence.cached_count:
            raise BadInput(f"{sequence!r} has rows that were not cached: nothing may land on them")
        if peer not in self._peers:
            raise BadInput(f"peer {peer:016x} is not met: {len(self._peers)} peers are")
        if uid in self._entries:
            raise BadInput(f"handoff {uid} is under way already")
        if not self._free_slots:
            raise PoolFull(
                limiter=HANDOFFS,
                needed=1,
                free=0,
                sentence=f"all {self._arrivals_max} handoffs that may arrive at once are under way;"
                f" raise arrivals_max",
            )

    def _room(self, sequence: Sequence, uid: int) -> Reserved:
        tokens = sequence.tokens[:-1]
        first = sequence.cached_count // PAGE_ROWS
        page_end = div_ceil(len(tokens), PAGE_ROWS)
        if page_end - first > PAGES_MAX:
            raise BadInput(f"handoff {uid} has {page_end - first} pages, at most {PAGES_MAX}")
        self._ticket += 1
        return Reserved(
            uid=uid,
            ticket=self._ticket,
            token_count=len(tokens),
            text=text_digest(tokens, sequence.salt),
            first_page=first,
            pool_pages=self._pools.latent.pages.page_count,
            window_at=self._free_slots[-1],
            pages=tuple(sequence.holding.host_pages[first:page_end].tolist()),
        )

    # ---- what comes

    def _take_piece(self, piece: Piece, peer: int) -> None:
        verdict = self._arrivals.take(piece, sender=peer, read=self._read)
        entry = self._entries.get(piece.uid)
        if entry is None or verdict not in (Verdict.TAKEN, Verdict.CORRUPT):
            return
        now_s = self._clock.now_s()
        if verdict is Verdict.TAKEN:
            self.received_bytes += piece.byte_count
            entry.is_answered = True
            entry.mark("first piece", now_s)
            entry.moved(now_s)
        elif entry.ending is None:
            self._transport.allow(entry.room.ticket)

    def _read(self, piece: Piece) -> list[memoryview]:
        room = self._entries[piece.uid].room
        return views(piece_runs(self._pools.layout, piece, room), self._regions)

    def _take_count(self, count: Count, peer: int) -> None:
        entry = self._entries.get(count.uid)
        if entry is None or entry.peer != peer:
            if len(self._strays) < STRAYS_MAX and peer in self._peers:
                self._strays[peer, count.uid] = None
            return
        self._arrivals.heard(count.uid, sender=peer)
        entry.posted_count = count.arrived
        if not entry.is_answered:
            entry.is_answered = True
            now_s = self._clock.now_s()
            entry.mark("answered", now_s)
            entry.moved(now_s)

    def _take_refused(self, refused: Refused, peer: int) -> None:
        entry = self._entries.get(refused.uid)
        if entry is None or entry.peer != peer or entry.ending is not None:
            return
        if refused.reason is Reason.FULL:
            entry.nag_s = self._clock.now_s() + min(refused.retry_ms / 1000, NAG_S_MAX)
            entry.is_to_repeat = True
            return
        entry.sentence = f"peer {peer:016x} refuses it: {_words(refused.reason)}"
        self._remove(entry)

    def _take_release(self, release: Release, peer: int) -> None:
        entry = self._entries.get(release.uid)
        if entry is None or entry.peer != peer:
            return
        if release.reason is not Reason.SETTLED:
            if entry.ending is None:
                self._miss(entry, Reason.ABORTED, f"given up ({_words(release.reason)})")
        elif entry.ending is Reason.DONE:
            self._settled(entry)
        elif entry.ending is not None:
            self._remove(entry)

    def _settled(self, entry: Arriving) -> None:
        """A late second copy may have written over checked pages: then the rows are missed."""
        if not entry.arrival.is_complete:
            entry.sentence = f"a late copy from peer {entry.peer:016x} was corrupt"
            self._remove(entry)
            return
        self._land(entry)

    # ---- a handoff ends

    def _complete(self, entry: Arriving, now_s: float) -> None:
        """All is there and checked. It is final once nothing more can land on it.

        A second copy of a unit may be on its way into memory that has been checked. What came
        whole has its own message and is checked like the first; what came in part is waited for.
        """
        entry.mark("complete", now_s)
        if not self._transport.guards:
            entry.ending = Reason.DONE
            entry.moved(now_s)
            self._say(Release(entry.uid, Reason.DONE), entry.peer)
            return
        if self._transport.is_landing(entry.room.ticket):
            return
        self._transport.forbid(entry.room.ticket)
        if not self._transport.is_landing(entry.room.ticket):
            self._land(entry)

    def _land(self, entry: Arriving) -> None:
        try:
            windows = self._windows(entry)
            require_state(entry.sequence, "preempted")
        except (BadInput, BadState) as wrong:
            entry.sentence = f"all rows came, but {wrong}"
            self._remove(entry, told=Reason.ABORTED)
            return
        latent, progress = self._pools.latent, entry.sequence.progress
        rows = entry.room.token_count - entry.room.first_page * PAGE_ROWS
        latent.mark_arrived(entry.pages, rows)
        progress.arrival_count += 1
        progress.refresh()
        entry.mark("landed", self._clock.now_s())
        self.landed_count += 1
        self._outcomes.append(Landed(entry.uid, windows, entry.timeline))
        self._remove(entry, told=Reason.DONE)

    def _windows(self, entry: Arriving) -> tuple[list[WindowSet], int]:
        at, size = entry.room.window_at, entry.arrival.window_bytes
        return unpacked_windows(
            self._regions[WINDOWS].memory.data[at : at + size],
            group_count=self._pools.layout.group_count,
            length=entry.room.token_count,
        )

    def _miss(self, entry: Arriving, reason: Reason, sentence: str) -> None:
        count = entry.arrival.count
        came = f"{count.arrived} of {count.wanted} pages of a layer had come"
        entry.sentence = f"{sentence} from peer {entry.peer:016x}: {came}"
        self._end(entry, reason)

    def _end(self, entry: Arriving, reason: Reason) -> None:
        """It will not land: its pages are free now, or when the peer has answered."""
        self._arrivals.close(entry.uid)
        self._transport.forbid(entry.room.ticket)
        if self._transport.guards:
            self._remove(entry, told=reason)
            return
        entry.ending = reason
        entry.moved(self._clock.now_s())
        self._say(Release(entry.uid, reason), entry.peer)

    def _remove(self, entry: Arriving, *, told: Reason | None = None) -> None:
        """Nothing lands on its pages any more."""
        self._arrivals.close(entry.uid)
        self._transport.forbid(entry.room.ticket)
        del self._entries[entry.uid]
        self._pools.latent.drop(entry.pages)
        self._free_slots.append(entry.room.window_at)
        if told is not None:
            self._say(Release(entry.uid, told), entry.peer)
        if entry.sentence:
            self.missed_count += 1
            self._outcomes.append(Missed(entry.uid, entry.sentence, entry.timeline))

    # ---- what is said

    def _nag(self, entry: Arriving, now_s: float) -> None:
        """Says again what has not been answered, or asks for what was sent and has not come."""
        is_patient = entry.nagged(now_s)
        if entry.ending is not None:
            self._say(Release(entry.uid, entry.ending), entry.peer)
        elif not entry.is_answered:
            self._repeat_room(entry)
        elif not is_patient or entry.posted_count > entry.arrival.count.arrived:
            self._ask(entry)

    def _repeat_room(self, entry: Arriving) -> None:
        """Where tickets do not guard the pages no second Reserved may be under way: the peer could
        read it after the Release and obey it."""
        if self._transport.guards or entry.is_to_repeat:
            entry.is_to_repeat = False
            self._say(entry.room, entry.peer)

    def _ask(self, entry: Arriving) -> None:
        for _, again in zip(range(AGAINS_MAX), entry.arrival.missing(), strict=False):
            self.again_count += 1
            self._say(again, entry.peer)

    def _say(self, message: Message, peer: int) -> None:
        frame = self._seal.sealed(message, sender=self._transport.epoch, receiver=peer)
        self._transport.post(Transfer(peer=peer, notification=frame, within_s=MESSAGE_S))


def _words(reason: Reason) -> str:
    return reason.name.lower().replace("_", " ")
