"""How a request goes from state to state; with each change it gets or gives up what belongs to it.

    waiting -> prefilling -> decoding -> finished     `open`, `arrive`, `finish`
    waiting -> landing, loading -> preempted          its rows come from elsewhere: `open`
    prefilling, decoding -> preempted                 `preempt`
    preempted -> prefilling, decoding                 `resume`

The engine decides when; a change that lacks room raises PoolFull and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ess.door import Offload
from ess.engine.config import EngineConfig
from ess.engine.handoff import Handoffs
from ess.engine.requests.admission import Admission
from ess.engine.requests.entry import Entry
from ess.engine.requests.intake import Intake
from ess.engine.requests.request import FinishReason, Request, State
from ess.engine.requests.roster import Roster
from ess.engine.step.underway.flights import Flights
from ess.errors import BadInput, EssError, PoolFull, Unavailable, without_frames
from ess.pool.warmup import WindowSet


@dataclass(slots=True, kw_only=True, eq=False)
class Transitions:
    offload: Offload
    config: EngineConfig
    roster: Roster[Request]
    entry: Entry
    intake: Intake
    admission: Admission
    handoffs: Handoffs
    flights: Flights
    preempted_count: int = 0

    def open(self, request: Request) -> None:
        """Admits the request if the ledger has room: PoolFull says what it must wait for. A request
        that can never fit ends as refused and keeps the reason."""
        assert request.sequence is None, f"request {request.number} was opened twice"
        lands = request.lands
        try:
            opened = self.offload.open(
                request.tokens,
                length_max=request.length_max,
                promise=self.config.promise,
                salt=request.salt,
                reuse_max=request.reuse_max,
                on_device=not lands,
                from_disk=not lands,
            )
            self.handoffs.begin(request, opened)
        except (PoolFull, BadInput) as refusal:
            if isinstance(refusal, PoolFull) and refusal.retry_after_s is not None:
                raise
            return self.refuse(request, refusal)
        request.sequence = opened
        request.cached_count = request.prefilled_count = opened.cached_count
        is_whole = not lands and not opened.is_loading
        late: State = "landing" if lands else "loading"
        self.roster.move(request, "prefilling" if is_whole else late)
        if request.is_prefilled and is_whole:
            self.arrive(request, None)

    def begin_again(self, request: Request) -> None:
        """The prompt is prefilled here after all. The request was opened with all cached rows, but
        the state that it keeps beside its rows has not come, and cached rows may be useless without
        it."""
        assert request.sequence is not None, f"request {request.number} has no rows"
        request.sequence.close()
        request.sequence = request.takes = None
        request.cached_count = request.prefilled_count = 0
        self.roster.move(request, "waiting")

    def arrive(self, request: Request, windows: Tensor | None) -> None:
        """All rows of the prompt are in the pools."""
        if request.gives is None:
            self.land(request, windows)
        else:
            self.send(request, windows)

    def send(self, request: Request, windows: Tensor | None) -> None:
        """The request has ended, and so have its followers with the same destination."""
        self.handoffs.send(request, windows)
        followers = self.intake.followers.release(request)
        for follower in followers:
            self.roster.add(follower)
        for ended in (request, *followers):
            if ended.gives == request.gives:
                self.finish(ended, "sent")

    def land(self, request: Request, windows: Tensor | tuple[list[WindowSet], int] | None) -> None:
        """The request and its followers start to decode."""
        assert request.is_prefilled, f"request {request.number} has not all of its prompt"
        followers = self.intake.followers.release(request)
        forked = self.admission.fork(request, followers, limit=self.flights.limits.batch)
        for landed in (request, *forked):
            assert landed.sequence is not None, f"request {landed.number} has no rows"
            assert len(landed.output) == len(landed.prior_output), (
                f"request {landed.number} lands twice"
            )
            if windows is not None and self.config.warm:
                if isinstance(windows, Tensor):
                    landed.sequence.warm(windows)
                else:
                    landed.sequence.warm_from(*windows)
                landed.sequence.fill()
                self.handoffs.mark(landed, "warmed")
            self.roster.move(landed, "decoding")
            self.flights.enter(landed)

    def preempt(self, request: Request) -> None:
        assert request.sequence is not None, f"request {request.number} has no rows"
        assert not request.is_held, f"request {request.number} was preempted before"
        self.flights.leave(request)
        request.sequence.preempt()
        request.draft_count = 0
        self.roster.move(request, "preempted")
        self.preempted_count += 1
        self.admission.ask_again()

    def resume(self, request: Request) -> None:
        assert request.sequence is not None, f"request {request.number} has no rows"
        assert request.draft_count == 0, f"request {request.number} has drafts without a line"
        try:
            request.sequence.resume()
            if request.has_loaded:
                self.handoffs.offer(request)
        except (Unavailable, BadInput) as fault:
            return self.refuse(request, fault)
        request.is_held = False
        if request.has_landed:
            windows, request.windows = request.windows, None
            request.has_landed, request.prefilled_count = False, request.prefill_count
            self.roster.move(request, "prefilling")
            self.admission.ask_again()
            self.land(request, windows)
            return
        if request.has_loaded:
            request.has_loaded = False
            self.roster.move(request, "prefilling")
            if request.is_prefilled:
                self.arrive(request, None)
            return
        self.roster.move(request, "decoding" if request.is_prefilled else "prefilling")
        if request.is_prefilled:
            self.flights.enter(request)

    def refuse(self, request: Request, refusal: EssError) -> None:
        request.refusal = without_frames(refusal)
        self.finish(request, "refused")

    def finish(self, request: Request, reason: FinishReason) -> None:
        assert request.reason in (None, reason), f"request {request.number} ended before"
        request.reason = reason
        self.roster.move(request, "finished")
        self.entry.release(request)
        self.handoffs.give_up(request)
        self.close(request)
        self.intake.ended(request)

    def close(self, request: Request) -> None:
        """Frees the rows of an ended request once the host has learned its last step."""
        assert request.state == "finished", f"request {request.number} is {request.state}"
        self.admission.ask_again()
        if request.sequence is None or request.flight_count:
            return
        self.flights.leave(request)
        request.sequence.close()
        request.sequence = None
