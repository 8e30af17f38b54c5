"""Requests whose cached prompt comes from the disk: others run while its pages are read.

waiting --> loading --> preempted: it has loaded, and waits for the device as one that has landed

What could not be read is prefilled like any other prompt. Pages also go the other way: when host
pages are short, a preempted request gives up those that the disk has too, and gets them back when
it resumes.
"""

from __future__ import annotations

from ess.door import Offload
from ess.engine.requests.admission import Act
from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.errors import PoolFull
from ess.pool.capacity import HOST_PAGES


class Loads:
    def __init__(self, roster: Roster[Request], offload: Offload) -> None:
        self._roster = roster
        self._offload = offload

    @property
    def is_busy(self) -> bool:
        return self._roster.count("loading") > 0

    def settle(self) -> int:
        """How many requests continue from now on: their pages have come, or will not come."""
        if not self.is_busy:
            return 0
        self._offload.load()
        done = [request for request in self._roster.of("loading") if not _is_loading(request)]
        for request in done:
            assert request.sequence is not None, f"request {request.number} has no pages"
            request.has_loaded = True
            request.cached_count = request.prefilled_count = request.sequence.cached_count
            self._roster.move(request, "preempted")
        return len(done)

    def with_room(self, act: Act) -> Act:
        """Calls `act`; if host pages are short for it, calls it again after preempted requests have
        given up theirs."""

        def acted(request: Request) -> None:
            try:
                act(request)
            except PoolFull as refusal:
                is_short = refusal.limiter == HOST_PAGES and not refusal.permanent
                if not (is_short and self._shelve(refusal.needed - refusal.free, request)):
                    raise
                act(request)

        return acted

    def _shelve(self, page_count: int, keep: Request) -> bool:
        """Frees host pages of preempted requests that the disk has too; returns whether it freed
        any. Requests that the caller has preempted give theirs first, then the last in rank; `keep`
        gives none, nor does a request whose pages are being sent."""
        ranked = self._roster.by_rank("preempted")[::-1]
        left = page_count
        for request in sorted(ranked, key=lambda request: not request.is_held):
            if left > 0 and request is not keep and _may_shelve(request):
                assert request.sequence is not None, f"request {request.number} has no pages"
                left -= request.sequence.shelve(left)
        return left < page_count

    def wait(self) -> bool:
        """Waits for the pages of a request; False where none loads."""
        for request in self._roster.of("loading"):
            assert request.sequence is not None, f"request {request.number} has no pages"
            request.sequence.wait()
            return True
        return False


def _is_loading(request: Request) -> bool:
    assert request.sequence is not None, f"request {request.number} has no pages"
    return request.sequence.is_loading


def _may_shelve(request: Request) -> bool:
    assert request.sequence is not None, f"request {request.number} has no pages"
    return request.gives is None and not request.has_come and not request.sequence.is_shelved
