"""Which requests may run: preempted requests resume, then waiting requests are admitted, by rank.
Followers are forked from a leader whose prompt is there.

The ledger says when there is room; asking it costs a pass over the prompt. So after a refusal it is
asked again only when a request has ended, was preempted, has landed, or has become the first that
waits (`ask_again`).

No thrashing: after a shortage a preempted request comes back only when `PAUSE_STEPS` steps have
passed, or when nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.tpot_control import TPOT
from ess.errors import PoolFull, without_frames

PAUSE_STEPS: Final = 16


Act = Callable[[Request], None]
"""Raises PoolFull where there is no room now."""


class Admission:
    """`refusal` says what the first request that must come in later is short of; `is_full`, that
    the pools have refused it, and nothing has happened since that may make room."""

    def __init__(self, roster: Roster[Request], *, tpot_ms: float) -> None:
        self.refusal: PoolFull | None = None
        self._roster = roster
        self._tpot_ms = tpot_ms
        self._resume_step = 0
        self.is_full = False

    @property
    def running_count(self) -> int:
        return self._roster.count("decoding") + self._roster.count("prefilling")

    def displaced(self) -> list[Request]:
        """The requests that wait for the device, by rank, without those that the caller has
        preempted."""
        return [request for request in self._roster.by_rank("preempted") if not request.is_held]

    def ask_again(self) -> None:
        self.is_full = False

    def fell_short(self, refusal: PoolFull) -> None:
        """Notes that a running request lacks room."""
        self.refusal = without_frames(refusal)

    def pause(self, step_count: int) -> None:
        """A request was preempted in this step, for lack of room."""
        self._resume_step = step_count + PAUSE_STEPS

    def admit(self, opens: Act, resumes: Act, *, step_count: int, limit: int) -> None:
        """Lets waiting requests in while the pools have room and fewer than `limit` run. The acts
        are not kept here: their owner refers to this object, and a cycle of references would
        outlive a closed engine."""
        if self.is_full and self.running_count:
            return
        self.is_full, self.refusal = False, None
        try:
            if self._resume_displaced(resumes, step_count, limit):
                while (request := self._roster.first_waiting()) is not None:
                    self._refuse_if_slow(limit)
                    opens(request)
        except PoolFull as refusal:
            self.refusal = without_frames(refusal)
            self.is_full = refusal.limiter != TPOT
            self._expect_ahead(opens)

    def fork(self, leader: Request, followers: Iterable[Request], *, limit: int) -> list[Request]:
        """The followers that run now, as far as there is room; the others wait."""
        assert leader.sequence is not None, f"request {leader.number} has no rows"
        forked = []
        for follower in followers:
            self._roster.add(follower)
            if self._roster.first_waiting() is not follower or self.displaced():
                continue
            try:
                self._refuse_if_slow(limit)
                follower.sequence = leader.sequence.fork()
            except PoolFull:
                continue
            follower.prefilled_count = leader.prefilled_count
            follower.cached_count = follower.sequence.cached_count
            self._roster.move(follower, "prefilling")
            forked.append(follower)
        return forked

    def _refuse_if_slow(self, limit: int) -> None:
        """PoolFull if one more request would make every request slower than `tpot_ms`."""
        if self._tpot_ms and self.running_count >= limit:
            sentence = f"{limit} requests fit into {self._tpot_ms} ms per token"
            raise PoolFull(limiter=TPOT, needed=1, free=0, sentence=sentence)

    def _resume_displaced(self, resumes: Act, step_count: int, limit: int) -> bool:
        """Whether all that wait for the device run again; before that no request is admitted."""
        for request in self.displaced():
            if self.running_count and step_count < self._resume_step:
                return False
            if request.has_come:
                self._refuse_if_slow(limit)
            resumes(request)
        assert not self.displaced(), "a request is admitted before a preempted one is resumed"
        return True

    def _expect_ahead(self, opens: Act) -> None:
        """Rows that come from elsewhere need nothing of the device until they are there. So their
        requests are admitted behind those that have landed and wait for the device. They are not
        admitted behind a preempted request, which needs the host pages of its growth back."""
        with suppress(PoolFull):
            while all(request.has_come for request in self.displaced()):
                request = self._roster.first_waiting()
                if request is None or not request.lands:
                    return
                opens(request)
