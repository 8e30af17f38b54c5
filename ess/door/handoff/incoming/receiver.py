"""Room for prompts whose rows are made elsewhere, and what has come of each.

    expect --> a leg from each worker --> all legs are whole --> landed
                `--> given up, or a leg is missed -------------> missed

Rows come from a worker that has all layers, or from several that have some each. A handoff lands
when every leg is whole, and is missed when a leg is: its other legs are then given up. Until it
lands nothing in the pool is marked, so no sequence reads a page of it, and a page cannot become
anything else: the receiver holds it beside its sequence, whatever happens to that, until all legs
are over.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np

from ess.array_types import Bytes, PageIds
from ess.door.checks import in_range
from ess.door.handoff import geometry
from ess.door.handoff.endings import HandoffCounts, Landed, Missed
from ess.door.handoff.incoming.arriving import Arriving
from ess.door.handoff.incoming.leg import Leg
from ess.door.handoff.incoming.legs import Legs
from ess.door.handoff.incoming.origins import Origin, Origins
from ess.door.offload import Offload
from ess.door.sequences.sequence import Sequence, require_state
from ess.errors import BadInput, PoolFull
from ess.pool.latent import LatentPool
from ess.transfer.mail import Mail
from ess.transfer.messages import (
    PAGES_MAX,
    UID_MAX,
    Message,
    Piece,
    PieceKind,
    Reason,
    Reserved,
    text_digest,
)
from ess.transfer.runs import views
from ess.transfer.windows import unpacked_windows

HANDOFFS: Final = "handoffs"


class Receiver:
    """Handoffs to this worker, at most `arrivals_max` at once, those at rest included.

    It registers the host pool and `arrivals_max` slots for windows with the transport. A slot has
    room for a state too, where requests keep one: then there are no more than active sequences, and
    a sequence that has landed keeps its slot until it is on the device.
    Where the pool is a part of a model, `ground` is the memory of all of it, where every layer's
    rows lie.

    With `defers` a handoff that is over changes nothing in the pool before `conclude` is called.
    """

    def __init__(
        self,
        offload: Offload,
        mail: Mail,
        counts: HandoffCounts,
        *,
        arrivals_max: int,
        ground: geometry.Ground | None = None,
        defers: bool = False,
    ) -> None:
        in_range("arrivals_max", arrivals_max, 1, 4096)
        self._counts = counts
        self._offload = offload
        self._pools = offload.owner.pools
        lies_in = ground or self._pools.latent
        self._layout = lies_in.layout
        if self._layout.has_states:
            arrivals_max = min(arrivals_max, self._pools.sizes.sequence_max)
        self._defers = defers
        self._mail = mail
        self.origins = Origins(self._layout)
        self._legs = Legs(
            mail,
            counts,
            legs_max=arrivals_max * self._layout.group_count,
            read=self._read,
            accept=self._accept,
            knows=self.origins.knows,
        )
        self._arrivals_max = arrivals_max
        self._entries: dict[int, Arriving] = {}
        self._slot_bytes = geometry.slot_bytes(self._layout, self._pools.sizes.length_max)
        self._free_slots = [slot * self._slot_bytes for slot in range(arrivals_max)][::-1]
        self._lent: set[int] = set()
        self._ticket = 0
        self._outcomes: list[Landed | Missed] = []
        self._over: list[Arriving] = []
        size = arrivals_max * self._slot_bytes
        slots = geometry.fresh_region(geometry.SLOTS, size, lies_in)
        listed = [*geometry.pool_regions(lies_in), slots]
        self._regions = {region.number: region for region in listed}
        mail.transport.register(listed)

    def __len__(self) -> int:
        return len(self._entries)

    # ---- what the owner of the sequences does

    def expect(self, sequence: Sequence, *, uid: int, peer: int) -> Arriving:
        """Tells a peer, and those it is the lead of, that there is room for the rows of this
        sequence that are not cached.

        The sequence was opened with `on_device=False`, and nothing has been imported. Where
        the peer is not connected, the handoff is refused, and counts as missed.
        """
        origins = self._check_expected(sequence, uid, peer)
        rooms = self._rooms(sequence, uid, origins)
        entry = Arriving(
            uid=uid,
            sequence=sequence,
            pages=np.array(rooms[0].pages, np.int32),
            slot=self._free_slots.pop(),
            row_count=awaited_count(sequence),
            began_s=self._mail.now_s(),
        )
        self._pools.latent.hold(entry.pages)
        self._entries[uid] = entry
        entry.legs = tuple(map(self._leg, origins, rooms))
        return entry

    def give_up(self, uid: int, reason: Reason = Reason.ABORTED) -> None:
        """The rows are not wanted any more, and the handoff will have no outcome. The owner closes
        the sequence. Does nothing if the handoff has ended."""
        entry = self._entries.get(uid)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.uid != uid]
        if entry is None:
            return
        entry.is_given_up = True
        for leg in entry.legs:
            if leg.is_counted:
                self._legs.end(leg, reason)
        self._join()

    def outcomes(self) -> list[Landed | Missed]:
        """The handoffs that have ended since the last call."""
        ended, self._outcomes = self._outcomes, []
        return ended

    # ---- what the port tells

    def knows(self, uid: int, *, peer: int) -> bool:
        return self._legs.has(uid, peer=peer)

    def take(self, message: Message, *, peer: int) -> None:
        self._legs.take(message, peer=peer)
        self._join()

    def peer_lost(self, peer: int, reason: str) -> None:
        self.origins.lost(peer)
        self._legs.peer_lost(peer, reason)
        self._join()

    def expire(self) -> None:
        """Lands complete handoffs, ends handoffs that were silent for too long, and repeats
        messages that were lost."""
        self._legs.expire()
        self._join()

    def close(self) -> None:
        """The transport is closed: what has not landed will not."""
        self._legs.close()
        self._join()

    def check(self) -> None:
        self._legs.check()
        taken = [*(entry.slot for entry in self._entries.values()), *self._lent]
        slots = sorted([*taken, *self._free_slots])
        assert slots == [slot * self._slot_bytes for slot in range(self._arrivals_max)], slots
        for uid, entry in self._entries.items():
            assert uid == entry.uid, f"handoff {entry.uid} is listed as {uid}"
            self._check_entry(entry)

    def _check_entry(self, entry: Arriving) -> None:
        uid, latent, end = entry.uid, self._pools.latent, entry.slot + self._slot_bytes
        assert entry.is_over == (entry in self._over), f"handoff {uid} is over and kept"
        for leg in entry.legs:
            assert self.knows(uid, peer=leg.peer) != leg.is_over, f"handoff {uid}: {leg.peer:016x}"
            assert entry.slot <= leg.room.window_at < end, f"handoff {uid}: {leg.room.window_at}"
            is_wanted = not entry.is_given_up and entry.missed is None
            assert is_wanted or not leg.is_going_on, f"handoff {uid}: a leg goes on for nothing"
        assert all(latent.pages.hold_count(page) > 0 for page in entry.pages.tolist()), uid
        assert not latent.stored[:, entry.pages].any(), f"handoff {uid}: stored"

    # ---- a handoff begins

    def _check_expected(self, sequence: Sequence, uid: int, peer: int) -> tuple[Origin, ...]:
        in_range("uid", uid, 0, UID_MAX)
        self._offload.owner.own([sequence])
        require_state(sequence, "preempted")
        if sequence.arrival_count or sequence.text_length != sequence.cached_count:
            raise BadInput(f"{sequence!r} has rows that were not cached: nothing may land on them")
        origins = self.origins.find(peer)
        if origins is None:
            self._counts.missed_count += 1
            raise BadInput(f"peer {peer:016x} is not connected; {len(self.origins)} peers are")
        if uid in self._entries:
            raise BadInput(f"handoff {uid} is under way already")
        if not self._free_slots:
            raise PoolFull(
                limiter=HANDOFFS,
                needed=1,
                free=0,
                sentence=f"all {self._arrivals_max} handoffs that may arrive at once are under way;"
                f" raise {'sequence_max' if self._layout.has_states else 'arrivals_max'}",
            )
        return origins

    def _rooms(self, sequence: Sequence, uid: int, origins: tuple[Origin, ...]) -> list[Reserved]:
        """The rooms of the legs: the same pages for each, and for each a ticket and a place for
        windows of its own."""
        tokens, layout = sequence.tokens[:-1], self._layout
        first = sequence.cached_count // self._layout.page_tokens
        awaited = awaited_pages(sequence)
        if len(awaited) > PAGES_MAX:
            raise BadInput(f"handoff {uid} has {len(awaited)} pages, at most {PAGES_MAX}")
        text = text_digest(tokens, sequence.salt)
        pages = tuple(awaited.tolist())
        sizes = (geometry.window_bytes(layout, len(of.groups), len(tokens)) for of in origins)
        places = accumulate(sizes, initial=self._free_slots[-1])
        self._ticket += len(origins)
        return [
            Reserved(
                uid=uid,
                ticket=self._ticket - number,
                token_count=len(tokens),
                text=text,
                first_page=first,
                pool_pages=self._pools.latent.pages.page_count,
                window_at=window_at,
                pages=pages,
            )
            for number, (_, window_at) in enumerate(zip(origins, places, strict=False))
        ]

    def _leg(self, origin: Origin, room: Reserved) -> Leg:
        listed = geometry.shares(
            self._layout,
            *(origin.layers, origin.groups),
            first_page=room.first_page,
            token_count=room.token_count,
        )
        return self._legs.begin(origin, room, listed)

    # ---- what comes

    def _read(self, leg: Leg, piece: Piece) -> list[memoryview]:
        return views(geometry.piece_runs(self._layout, piece, leg.room), self._regions)

    def _accept(self, leg: Leg) -> None:
        at, size = leg.room.window_at, leg.arrival.window_bytes
        leg.windows = unpacked_windows(
            self._regions[geometry.SLOTS].memory.data[at : at + size],
            group_count=len(leg.origin.groups),
            length=self._layout.rows_of(leg.room.token_count),
        )
        require_state(self._entries[leg.uid].sequence, "preempted")

    # ---- a handoff ends

    def _join(self) -> None:
        """Ends handoffs whose legs have ended. A missed leg ends the other legs of its handoff."""
        while over := self._legs.over():
            for leg in over:
                entry = self._entries.get(leg.uid)
                if entry is None:
                    continue
                if not leg.is_whole and entry.missed is None:
                    entry.missed = leg
                    self._end_others(entry)
                if entry.is_over and entry not in self._over:
                    self._over.append(entry)
        if not self._defers:
            self.conclude()

    def conclude(self) -> list[Arriving]:
        """Applies the ends of handoffs to their pages and sequences."""
        ended, self._over = self._over, []
        for entry in ended:
            self._end(entry)
        return ended

    def _end_others(self, entry: Arriving) -> None:
        for leg in entry.legs:
            if leg.is_going_on:
                self._legs.end(leg, Reason.ABORTED)

    def _end(self, entry: Arriving) -> None:
        """Settles a handoff on whose pages no bytes land any more."""
        if entry.is_given_up:
            pass
        elif entry.missed is None:
            self._land(entry)
        else:
            self._counts.missed_count += 1
            sentence = entry.missed.sentence
            self._outcomes.append(Missed(entry.uid, sentence, entry.timeline()))
        del self._entries[entry.uid]
        self._pools.latent.drop(entry.pages)
        if entry.slot not in self._lent:
            self._free_slots.append(entry.slot)

    def _returned(self, slot: int) -> None:
        """Frees a slot whose state is on the device, or not wanted any more."""
        self._lent.remove(slot)
        self._free_slots.append(slot)

    def _land(self, entry: Arriving) -> None:
        if self._layout.has_states:
            self._lent.add(entry.slot)
            entry.sequence.holding.lend(self._state(entry), partial(self._returned, entry.slot))
        land(self._pools.latent, entry.sequence, entry.pages, entry.row_count)
        self._counts.landed_count += 1
        timeline = entry.timeline(self._mail.now_s())
        self._outcomes.append(Landed(entry.uid, entry.windows(), timeline))

    def _state(self, entry: Arriving) -> Bytes:
        """The bytes of a handoff's state in its slot."""
        (leg,), layout = entry.legs, self._layout
        units = range(geometry.state_units(layout, leg.room.token_count))
        size = layout.request_state_bytes(leg.room.token_count)
        runs = geometry.slot_runs(layout, PieceKind.STATE, units, size, leg.room)
        [view] = views(runs, self._regions)
        return np.frombuffer(view, np.uint8)


def awaited_pages(sequence: Sequence) -> PageIds:
    """Host pages of the rows that are not cached; the last token's row is made here."""
    layout, count = sequence.owner.pools.layout, len(sequence.tokens) - 1
    first = sequence.cached_count // layout.page_tokens
    return sequence.holding.host_pages[first : geometry.row_pages(layout, count)]


def awaited_count(sequence: Sequence) -> int:
    """How many rows are not cached."""
    layout = sequence.owner.pools.layout
    return layout.rows_of(len(sequence.tokens) - 1) - layout.rows_of(sequence.cached_count)


def land(latent: LatentPool, sequence: Sequence, pages: PageIds, row_count: int) -> None:
    """Notes that the rows lie on these pages."""
    latent.mark_arrived(pages, row_count)
    sequence.progress.landed()
