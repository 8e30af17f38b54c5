"""Parts of handoffs that are due leave as transfers, each with the sealed Piece that names it.

A peer has at most `UNDERWAY_BYTES_MAX` under way, and one transfer more. Other due parts wait;
those of the oldest handoff leave first. A failed transfer is posted again after a pause, because
its cause may last. Windows and states leave from few places, of which a handoff has one at a time:
a peer that takes nothing more keeps no other waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ess.door.handoff import geometry
from ess.door.handoff.endings import HandoffCounts
from ess.door.handoff.outgoing.departure import Departure
from ess.door.handoff.outgoing.packed import Packed
from ess.door.handoff.outgoing.units import Part
from ess.transfer.mail import Mail
from ess.transfer.messages import Piece, checksum
from ess.transfer.runs import Region, Runs, byte_count, merged, views
from ess.transfer.transport import Transfer

UNDERWAY_BYTES_MAX: Final = 64 << 20
RETRY_S: Final = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A transfer under way, and where its bytes lie here."""

    departure: Departure
    part: Part
    local: Runs

    @property
    def byte_count(self) -> int:
        return byte_count(self.local)


class Transfers:
    """`place_bytes` is room for the windows of any prompt, and for a part of its state."""

    def __init__(self, mail: Mail, counts: HandoffCounts, *, place_bytes: int) -> None:
        self._counts = counts
        self._mail = mail
        self._transport = mail.transport
        self._due: dict[int, dict[int, Departure]] = {}
        self._jobs: dict[int, Job] = {}
        self._underway_bytes: Counter[int] = Counter()
        self._packed = Packed(place_bytes)
        mail.transport.register([self._packed.region])

    # ---- what may leave

    def go_on(self, departure: Departure) -> None:
        """More of this departure may leave."""
        self._due.setdefault(departure.peer, {})[departure.uid] = departure
        self.push(departure.peer)

    def stop(self, departure: Departure) -> None:
        """No more of this departure leaves; transfers under way go on."""
        self._due.get(departure.peer, {}).pop(departure.uid, None)

    def lost(self, peer: int) -> list[int]:
        """Nothing more leaves to this peer. Returns the handles of the transfers under way to
        it."""
        self._due.pop(peer, None)
        return [handle for handle, job in self._jobs.items() if job.departure.peer == peer]

    def push_all(self) -> None:
        for peer in list(self._due):
            self.push(peer)

    def push(self, peer: int) -> None:
        """Posts what may leave to this peer, as far as its share of bytes under way goes."""
        due, now_s = self._due.get(peer, {}), self._mail.now_s()
        for departure in list(due.values()):
            if departure.paused_until_s > now_s:
                continue
            while self._underway_bytes[peer] < UNDERWAY_BYTES_MAX:
                part = departure.next_part()
                if part is None or not self._post(departure, part):
                    break
            else:
                return
            if part is None:
                del due[departure.uid]
        if not due:
            self._due.pop(peer, None)

    def _post(self, departure: Departure, part: Part) -> bool:
        """Posts the part; returns whether there was room for the pages to leave from."""
        local = None
        if part.kind.is_of_layers:
            local = departure.pages.lend(part)
        elif not self._is_packed(departure):
            local = self._packed.lend(departure.packed(part))
        if local is None:
            return False
        peer, piece = departure.peer, self._piece(departure, part, local)
        departure.units[part.kind].posted(part)
        handle = self._transport.post(
            Transfer(
                peer=peer,
                local=local,
                remote=departure.remote(part),
                notification=self._mail.sealed(piece, peer),
                ticket=departure.ticket,
                within_s=self._mail.wait_s,
            )
        )
        job = self._jobs[handle] = Job(departure, part, local)
        self._underway_bytes[peer] += job.byte_count
        departure.underway_count += 1
        return True

    def _is_packed(self, departure: Departure) -> bool:
        jobs = self._jobs.values()
        return any(job.departure is departure and not job.part.kind.is_of_layers for job in jobs)

    def _piece(self, departure: Departure, part: Part, local: Runs) -> Piece:
        layers = departure.wire_layers(part)
        return Piece(
            uid=departure.uid,
            kind=part.kind,
            layer_begin=layers.start,
            layer_end=layers.stop,
            page_begin=part.pages.start,
            page_end=part.pages.stop,
            byte_count=byte_count(local),
            checksum=checksum(views(merged(local, local)[0], self._regions(departure, part))),
        )

    def _regions(self, departure: Departure, part: Part) -> Mapping[int, Region]:
        if part.kind.is_of_layers:
            return departure.pages.regions
        return {geometry.PACKED: self._packed.region}

    # ---- what is under way

    def is_underway(self, uid: int, *, peer: int) -> bool:
        departures = (job.departure for job in self._jobs.values())
        return any((each.uid, each.peer) == (uid, peer) for each in departures)

    def completed(self, handle: int) -> Departure | None:
        """The departure whose transfer has ended; None if the transfer is not known here."""
        job = self._ended(handle)
        if job is None:
            return None
        job.departure.units[job.part.kind].landed(job.part)
        self._counts.sent_bytes += job.byte_count
        return job.departure

    def failed(self, handle: int, reason: str) -> Departure | None:
        job = self._ended(handle)
        if job is None:
            return None
        departure = job.departure
        departure.units[job.part.kind].failed(job.part)
        departure.fault = reason
        departure.paused_until_s = self._mail.now_s() + RETRY_S
        self._counts.failed_count += 1
        return departure

    def abandon(self) -> list[Departure]:
        """The transport moves nothing any more. Returns the handoffs that had transfers under
        way."""
        jobs = [self._ended(handle) for handle in list(self._jobs)]
        return list(dict.fromkeys(job.departure for job in jobs if job is not None))

    def _ended(self, handle: int) -> Job | None:
        job = self._jobs.pop(handle, None)
        if job is None:
            return None
        departure = job.departure
        self._underway_bytes[departure.peer] -= job.byte_count
        if not self._underway_bytes[departure.peer]:
            del self._underway_bytes[departure.peer]
        departure.underway_count -= 1
        source = departure.pages if job.part.kind.is_of_layers else self._packed
        source.give_back(job.local)
        return job

    def check(self, departures: Collection[Departure]) -> None:
        """The transfers of these handoffs."""
        jobs = self._jobs.values()
        counts = Counter(job.departure for job in jobs)
        for departure in departures:
            assert departure.underway_count == counts[departure], f"{departure.uid} miscounts"
        underway: Counter[int] = Counter()
        for job in jobs:
            underway[job.departure.peer] += job.byte_count
        assert underway == self._underway_bytes, "bytes under way are miscounted"
        self._packed.check(job.local for job in jobs if not job.part.kind.is_of_layers)
