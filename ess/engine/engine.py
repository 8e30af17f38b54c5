"""The engine: continuous batching over an offload, one step at a time.

    step: plan (who runs) -> launch (model, door, kernels) -> learn (tokens, states, endings)

A request waits until the ledger admits it, is prefilled chunk by chunk beside the decode batch,
decodes, may be preempted and resumed, and ends. At depth 0 a step learns what it has launched; at
depth 1 it learns what the step before has launched (`future`). Nothing here is concurrent: copies
run on the offload's lane, everything else in the caller's thread.

Under `promise="some"` a request is admitted with index pages for its prompt only, so more requests
run, and a growing request may find no free page. Then the engine preempts the running request that
is last in rank: it gives up its slots and pages, and goes on later without recompute. No livelock:
the first request in rank is never preempted, admission refuses a request that could not run alone,
and host pages, which preemption does not free, are promised in full. So the first request in rank
always makes its tokens and ends.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Unpack

import torch

from ess.clock import Clock, RealClock
from ess.door import Offload
from ess.engine.config import EngineConfig
from ess.engine.entries.over import way_of
from ess.engine.entries.refusals import check_layout
from ess.engine.handoff import Ended, Exchange, Handoffs
from ess.engine.plan import Chunk, NewTokens, StepPlan, StepResult
from ess.engine.process.messages import ExpertLine, GraphLine, StageLine
from ess.engine.prompt.run import Prefilled, span_of
from ess.engine.prompt.scores import score
from ess.engine.ranks.agreement import Alone, Ranks, StepNeeds
from ess.engine.requests.admission import Admission
from ess.engine.requests.entry import Entry
from ess.engine.requests.intake import Intake, RequestOptions
from ess.engine.requests.loads import Loads
from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.requests.transitions import Transitions
from ess.engine.step.feeding import Outcome
from ess.engine.step.runner import made_runner
from ess.engine.step.underway.audit import check_waiting
from ess.engine.step.underway.flights import Flights
from ess.engine.step.warmth import Warmth
from ess.engine.step.way import Way
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.sampling import Sampling
from ess.engine.tpot_control import Pace, SeenStep
from ess.errors import BadInput, BadState, PoolFull, Unavailable
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """A tokenizer is needed by requests with stop strings or a grammar, and by no others; a `port`
    by those whose rows go to other workers or come from them. Engines that divide the experts have
    `ranks`, which meet in every step: an engine without requests stands by."""

    def __init__(
        self,
        model: Model,
        offload: Offload,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
        port: Exchange | None = None,
        ranks: Ranks | None = None,
        way: Way | None = None,
        entry: Entry | None = None,
    ) -> None:
        _check(model, offload, config)
        self.offload = offload
        self.step_count = 0
        self.moved_count = 0
        self._clock = clock or RealClock()
        self._config = config
        self._way = way or way_of(model, offload, config, is_alone=ranks is None)
        self.runner = made_runner(model, offload, config, self._way.heads)
        self.tuning = self.runner.tuning
        self.verifier = self.runner.verifier
        self._entry = entry or Entry(model.config, tokenizer)
        self._roster: Roster[Request] = Roster()
        self._loads = Loads(self._roster, offload)
        self._admission = Admission(self._roster, tpot_ms=config.tpot_ms)
        self._handoffs = Handoffs(port, self.runner, config, on_end=self._admission.ask_again)
        self._intake = Intake(self._roster, on_first=self._admission.ask_again)
        self._ranks = ranks or Alone()
        self._flights = Flights(
            self.runner, config, clock=self._clock, ranks=self._ranks, way=self._way
        )
        self._transitions = Transitions(
            offload=offload,
            config=config,
            roster=self._roster,
            entry=self._entry,
            intake=self._intake,
            admission=self._admission,
            handoffs=self._handoffs,
            flights=self._flights,
        )
        self._open = self._loads.with_room(self._transitions.open)
        self._resume = self._loads.with_room(self._transitions.resume)
        self._made: list[NewTokens] = []
        self._is_closed = False
        self._is_half_made = False

    # ---- requests

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Adds a request; `RequestOptions` says what each option means."""
        if self._is_closed:
            raise BadState("this engine is closed")
        request = self._intake.made(prompt, sampling, **options)
        self._handoffs.equip(request)
        may_enter = self._entry.equip(request, longest=self.offload.sizes.length_max)
        if may_enter:
            self._enter(request)
        return request

    def _enter(self, request: Request) -> None:
        self._intake.enter(request)
        if request.refusal is not None:
            self._transitions.finish(request, "refused")

    def cancel(self, request: Request) -> None:
        """May be called at any moment; the tokens of steps under way are dropped."""
        self._intake.leave(request)
        if self._entry.give_up(request):
            self._roster.add(request)
        if request.reason is None:
            self._transitions.finish(request, "cancelled")

    def preempt(self, request: Request) -> None:
        """Free the request's slots and index pages until `resume`, which needs no recompute.

        Steps under way are learned first; the request may have ended in one of them.
        """
        self._intake.require_own(request)
        if request.state not in ("prefilling", "decoding"):
            raise BadState(f"request {request.number} is {request.state}, not running")
        with self._wholly():
            self._learn(0)
        if request.reason is None:
            self._transitions.preempt(request)
            request.is_held = True

    def resume(self, request: Request) -> None:
        """A preempted request goes on; PoolFull if there is no room."""
        self._intake.require_own(request)
        if request.state != "preempted":
            raise BadState(f"request {request.number} is {request.state}, not preempted")
        self._resume(request)

    @property
    def preempted_count(self) -> int:
        """Preemptions since the start."""
        return self._transitions.preempted_count

    @property
    def refusal(self) -> PoolFull | None:
        """The shortage of the first request that must wait."""
        return self._admission.refusal

    @property
    def is_idle(self) -> bool:
        """No request runs, waits, lands or loads, no grammar compiles and no step is under way.
        There may still be requests that the caller preempted and has not resumed."""
        is_told = not self._flights and not self._made and self._entry.is_empty
        waiting_count = self._roster.count("waiting", "landing", "loading")
        is_left = self._admission.running_count or waiting_count or self._admission.displaced()
        return is_told and not is_left

    @property
    def warmth(self) -> Warmth:
        return self._flights.warmth

    @property
    def pace(self) -> Pace:
        return self._flights.pace

    def depth_reasons(self) -> tuple[str, ...]:
        """Why the next step must run at depth 0, though a greater depth may be configured; empty if
        it need not."""
        return self._flights.depth_reasons(self._roster)

    @property
    def depth(self) -> int:
        """Steps that may be under way when the next one is planned."""
        return self._flights.depth(self._roster)

    def check(self) -> None:
        """Audits all that lasts from step to step; an AssertionError names the fault."""
        for owner in (self.offload, self._roster, self._entry, self._intake.followers):
            owner.check()
        self.runner.check()
        self._handoffs.check(self._roster)
        check_waiting(self._roster, self._entry, self._intake.followers)
        self._flights.check(self._roster)

    # ---- the step

    @torch.inference_mode()
    def step(self) -> StepResult:
        """After an error in here (memory, a driver, Ctrl-C) the engine and its offload can only be
        closed: a step may be half made. BadState once one is."""
        depth = self.depth
        with self._wholly():
            self._learn(depth)
            self._rebalance()
            self.pump()
            for request in self._entry.compiled():
                self._enter(request)
        limit = self._flights.limits.batch
        self._admission.admit(self._open, self._resume, step_count=self.step_count, limit=limit)
        with self._wholly():
            plan = self._launch()
            scored = self._prefill(plan.chunks)
            self._learn(depth if plan.turns else 0)
            self._refill(plan)
            self.step_count += 1
            made, self._made = tuple(self._made), []
            return StepResult(made, plan.chunks, len(plan.turns), scored)

    @torch.inference_mode()
    def learn(self) -> None:
        """Waits for the steps under way; the next step returns what they made."""
        with self._wholly():
            self._learn(0)

    @torch.inference_mode()
    def stand_by(self, *, leaves: bool = False) -> None:
        """Joins the exchanges of the other ranks' step, without requests of its own."""
        if self._ranks.rest_s < math.inf:
            self._flights.stand_by(StepNeeds(leaves=leaves))
            self._flights.stand_by_prompts()

    @property
    def rest_s(self) -> float:
        """How long this rank may sleep while it has no requests."""
        return self._ranks.rest_s

    @torch.inference_mode()
    def rehearse(self, tell: Callable[[str], None]) -> None:
        """Before the first request: weights are packed where steps read them so, and a device
        captures the steps that will be usual as graphs."""
        assert self.is_idle, "requests wait for a rehearsal"
        self._flights.rehearse(tell)

    def pump(self) -> None:
        """Moves the rows of handoffs as far as they can move now, as every step does. Requests
        whose rows have come, from other workers or from the disk, continue as preempted requests
        do."""
        if self._loads.settle():
            self._admission.ask_again()
        for request, fault in self._handoffs.heard():
            if fault and self._config.handoff_failure == "refuse":
                self._transitions.refuse(request, Unavailable(fault))
            elif fault and self.offload.layout.has_states:
                self._transitions.begin_again(request)
            else:
                self._roster.move(request, "preempted")
                request.has_landed = not fault

    @property
    def ended_handoffs(self) -> Iterable[Ended]:
        """The most recent handoffs that have ended, the newest last."""
        return self._handoffs.ended

    @property
    def is_handing_over(self) -> bool:
        """Whether the next `pump` should come soon, even if no request can run."""
        return self._handoffs.is_busy or self._loads.is_busy

    def run(self) -> Iterable[StepResult]:
        """Steps until nothing can run: all is done, preempted, or waits for room or for rows."""
        while not self.is_idle:
            result = self.step()
            if not result.is_empty:
                yield result
            elif not (self._handoffs.has_told or self._entry.wait() or self._loads.wait()):
                return

    def forget_prefixes(self) -> None:
        """BadState while a request, or a handoff, holds cached pages."""
        self.offload.forget_prefixes()

    def stage_lines(self) -> tuple[StageLine, ...]:
        """None: an engine of one process has no stages."""
        return ()

    def graph_line(self) -> GraphLine | None:
        return self._flights.graph_line()

    def expert_line(self) -> ExpertLine | None:
        return self._ranks.line()

    def close(self) -> None:
        """Lets graphs go, and ends the processes of the grammars. Until all ranks want to end, this
        one stands by."""
        while not self._ranks.latest.all_leave:
            self.stand_by(leaves=True)
        self._is_closed = True
        self._flights.close()
        self._entry.close()

    def _rebalance(self) -> None:
        every = self._config.budget_every
        if every and self.step_count % every == every - 1:
            self._learn(0)
            self.moved_count += self.offload.rebalance()

    def _launch(self) -> StepPlan:
        """Launches a step. If a request needs a page and none is free, makes room and tries
        again."""
        while True:
            try:
                return self._flights.launch(self._roster)
            except PoolFull as refusal:
                self._make_room(refusal)

    @contextlib.contextmanager
    def _wholly(self) -> Iterator[None]:
        """Runs a part of a step that an error leaves half made: a later step would lose tokens, or
        repeat them. Admission runs outside: an offer that breaks off there undoes itself."""
        if self._is_half_made:
            raise BadState("a step of this engine failed midway: close the engine and its offload")
        self._is_half_made = True
        yield
        self._is_half_made = False

    def _refill(self, plan: StepPlan) -> None:
        if self._config.warm:
            opened = [turn.request.sequence for turn in plan.turns]
            self.offload.refill([sequence for sequence in opened if sequence is not None])

    def _make_room(self, refusal: PoolFull) -> None:
        """Learns the steps under way, which may end a request; without any, preempts the last in
        rank. A request that runs alone lacks room only if another user of the offload holds the
        pages: preempted, it waits for them."""
        self._admission.fell_short(refusal)
        if self._flights:
            self._learn(0)
            return
        running = self._roster.by_rank("decoding", "prefilling")
        assert running, "no request runs, and pages are short"
        self._transitions.preempt(running[-1])
        self._admission.pause(self.step_count)

    def _prefill(self, chunks: Sequence[Chunk]) -> tuple[tuple[Chance, ...], ...]:
        """Runs the chunks as one pack; then the prompts that are complete land, in order of
        rank."""
        if not chunks:
            self._flights.stand_by_prompts()
            return ()
        started_s = self._clock.now_s()
        spans = [span_of(chunk) for chunk in chunks]
        on_layer = self._handoffs.while_made(chunks)
        prefilled = self._way.prefilled(self.runner, spans, on_layer)
        self._ranks.check()
        scored = self._scored(prefilled, chunks)
        seconds = self._clock.now_s() - started_s
        tokens = sum(chunk.count for chunk in chunks)
        self._flights.observe(SeenStep(chunk_tokens=tokens, chunk_seconds=seconds))
        for chunk, made in zip(chunks, prefilled, strict=True):
            chunk.request.prefilled_count = chunk.stop
            if chunk.is_last:
                self._transitions.arrive(chunk.request, made.windows)
        return scored

    def _scored(
        self, prefilled: Sequence[Prefilled], chunks: Sequence[Chunk]
    ) -> tuple[tuple[Chance, ...], ...]:
        return tuple(score(*each) for each in zip(prefilled, chunks, strict=True))

    # ---- what the host learns, and what follows from it

    def _learn(self, flight_max: int) -> None:
        """Learns the oldest steps until at most `flight_max` are under way. Rows of handoffs move
        while the host waits for a device."""
        while len(self._flights) > flight_max:
            self._handoffs.move_until(self._flights.have_landed)
            for outcome in self._flights.learn():
                self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        request = outcome.feed.request
        if request.state == "finished":
            self._transitions.close(request)
            return
        assert request.state == "decoding", f"request {request.number} is {request.state}"
        choice = outcome.choice
        made = choice.made
        if made:
            kept = tuple(request.take(list(made)))
            self._made.append(NewTokens(request, kept, outcome.drafts, choice.chances[: len(kept)]))
        if choice.is_broken:
            request.break_off()
        self._handoffs.stepped(request)
        if request.reason is not None:
            self._transitions.finish(request, request.reason)


def _check(model: Model, offload: Offload, config: EngineConfig) -> None:
    if not offload.owner.is_open:
        raise BadState("this offload is closed")
    layout = offload.layout
    if model.is_first and model.is_last:  # not a part, whose layers have other numbers
        check_layout(model.config, layout)
    has_mtp = (model.mtp and layout.mtp_layer_count) or layout.verified_max > 1
    if config.mtp > 1 and not (has_mtp or layout.mtp_elsewhere):
        raise BadInput(f"mtp is {config.mtp}, but the model or the layout has no MTP layer")
