"""Requests whose cached prompt comes from the disk: others run while its pages are read.

waiting --> loading --> preempted: it has loaded, and waits for the device as one that has landed

What could not be read is prefilled like any other prompt: no request fails because of the disk.
"""

from __future__ import annotations

from ess.door import Offload
from ess.engine.request import Request
from ess.engine.roster import Roster


class Loads:
    def __init__(self, roster: Roster[Request], offload: Offload) -> None:
        self._roster = roster
        self._offload = offload

    @property
    def is_busy(self) -> bool:
        return self._roster.count("loading") > 0

    def settle(self) -> int:
        """How many requests go on from now: their pages have come, or will not."""
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
