"""The first stage decides for all stages which prompts are admitted, run next, and are forgotten.

    step: take reports -> admit -> one micro-batch through its own layers -> on to the next stage

It takes the place of an engine: requests go in, and each ends as "sent" when the last stage has run
its last chunk. Several requests are under way at once, in order of rank, in at most
`stage count + AHEAD` micro-batches. `Openings` opens their prompts on every stage, and `Issuer`
gives the orders.

A request that has ended leaves its prompt in place until every stage has reported that its handoff
is over; then all stages close the prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, Unpack

from ess.clock import Clock
from ess.comm.group import Group
from ess.engine.config import EngineConfig
from ess.engine.handoff import ENDED_MAX, Ended
from ess.engine.plan import Chunk, StepResult
from ess.engine.process.messages import StageLine
from ess.engine.requests.admission import Admission
from ess.engine.requests.entry import check_prompt
from ess.engine.requests.intake import Intake, RequestOptions
from ess.engine.requests.request import FinishReason, Request
from ess.engine.requests.roster import Roster
from ess.engine.step.warmth import Warmth
from ess.engine.step_bytes import positions_max
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState, PoolFull
from ess.prefill import orders
from ess.prefill.batches import Batches
from ess.prefill.issuer import Issuer
from ess.prefill.openings import Openings
from ess.prefill.orders import (
    SALT_BYTES_MAX,
    Close,
    Forget,
    GiveUp,
    Meet,
    Part,
    Profile,
    Run,
)
from ess.prefill.prompts import Prompt, Prompts
from ess.prefill.reports import Counted, Ran, Released, Report
from ess.prefill.stage import Stage
from ess.prefill.stages import Stages
from ess.transfer.messages import UID_MAX

AHEAD: Final = 2
POLL_S: Final = 0.05


class Sizer(Protocol):
    """Chooses the length of the next chunk, and learns from the chunks that have run."""

    def next(self, done: int, left: int) -> int: ...

    def observe(self, done: int, count: int, seconds: float) -> None: ...


class Lead:
    """`stage` is this rank's own; `layers` are the main layers of every stage."""

    preempted_count = 0
    depth = 0

    def __init__(
        self,
        stage: Stage,
        group: Group,
        config: EngineConfig,
        *,
        layers: Sequence[tuple[int, int]],
        sizer: Sizer,
        clock: Clock,
        stage_timeout_s: float,
    ) -> None:
        self.offload = stage.offload
        self.step_count = 0
        self.stages = Stages(group, layers, timeout_s=stage_timeout_s, free=stage.free)
        self.tuning = stage.runner.tuning
        self.verifier = stage.runner.verifier
        self.warmth = Warmth()
        self.ended_handoffs: deque[Ended] = deque(maxlen=ENDED_MAX)
        self._issuer = Issuer(stage, self.stages, group)
        self._sizer = sizer
        self._clock = clock
        self._roster: Roster[Request] = Roster()
        self._prompts = Prompts()
        self._openings = Openings(self._issuer, self._prompts, self._roster, clock=clock)
        self._admission = Admission(self._roster, tpot_ms=0.0)
        self._intake = Intake(self._roster, on_first=self._admission.ask_again)
        self._batches = Batches(self.stages.count)
        self._running_max = config.max_running

    # ---- requests

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Like `Engine.add`. Every request hands over its rows; none is decoded or scored here."""
        request = self._intake.made(prompt, sampling, **options)
        _check_options(request)
        vocabulary = self._issuer.stage.runner.model.config.vocab_size
        check_prompt(request, vocabulary=vocabulary, longest=self.offload.sizes.length_max)
        self._intake.enter(request)
        return request

    def cancel(self, request: Request) -> None:
        """May be called at any moment; chunks under way are finished, and then dropped."""
        self._intake.leave(request)
        if request.reason is None:
            self._finish(request, "cancelled")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        assert request.reason is None, f"request {request.number} ended before"
        request.reason = reason
        self._roster.move(request, "finished")
        prompt = self._prompts.get(request.number)
        if prompt is not None and reason != "sent":
            self._give_up(prompt)
        self._admission.ask_again()
        self._intake.ended(request)

    # ---- what an engine is asked

    @property
    def refusal(self) -> PoolFull | None:
        return self._admission.refusal

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or is under way. Handoffs of ended requests may be."""
        return not self._roster.count("waiting", "loading", "preempted", "prefilling")

    @property
    def is_handing_over(self) -> bool:
        """Whether `pump` should be called soon: reports are due, or rows are under way."""
        return len(self._prompts) > 0 or len(self._batches) > 0 or self._issuer.stage.is_busy

    def depth_reasons(self) -> tuple[str, ...]:
        return ()

    def graph_line(self) -> None:
        """None: no steps of stages are replayed."""

    def expert_line(self) -> None:
        """None: each rank has all experts of its layers."""

    def stage_lines(self) -> tuple[StageLine, ...]:
        now_s, silences = self._clock.now_s(), self.stages.silences()
        return tuple(
            StageLine(
                stage,
                layers,
                self._batches.busy_share(stage, now_s=now_s),
                self._batches.chunk_count(stage),
                silences[stage],
            )
            for stage, layers in enumerate(self.stages.layers)
        )

    def forget_prefixes(self) -> None:
        """Forgets cached prefixes on every stage."""
        if len(self._prompts):
            raise BadState(f"{len(self._prompts)} prompts are made, or handed over")
        self._issuer.order(Forget())

    def meet(self, metadata: bytes) -> None:
        """Makes the other stages meet the worker that this stage has met."""
        self.stages.order(Meet(metadata))

    def close(self) -> None:
        """Ends the other ranks in order; returns when all have obeyed."""
        self._issuer.order(orders.Stop())
        self.stages.finish()

    def check(self) -> None:
        for owner in (self._issuer.stage, self._roster, self._intake.followers, self._prompts):
            owner.check()
        self._batches.check()
        self.stages.check()
        requests = self._roster.by_rank("loading", "preempted", "prefilling")
        numbers = {request.number for request in requests}
        opened = [prompt for prompt in self._prompts.all() if prompt.request.reason is None]
        assert numbers == {prompt.number for prompt in opened}, "a request without its prompt"

    def measure(self, count: int) -> float | None:
        """Seconds that the slowest stage takes for `count` made-up tokens, with nothing else under
        way; None if the pools cannot hold them."""
        assert self.is_idle, "a measurement beside requests"
        batch = self._batches.begin()
        try:
            self._issuer.order(Profile(batch.number, count))
        except (PoolFull, BadInput):
            self._batches.drop(batch)
            return None
        self.pump()
        while not self._batches.is_through(batch):
            self.stages.listen(wait_s=POLL_S)
            self.pump()
        return max(batch.seconds.values())

    # ---- the step

    def step(self) -> StepResult:
        self.pump()
        if not self._admission.is_full:  # pools change only by our orders: nothing fits in between
            enter, limit = self._enter, self._running_max
            self._admission.admit(enter, enter, step_count=self.step_count, limit=limit)
        parts = self._next_parts()
        chunks = tuple(map(self._chunk, [part for part in parts if part.stop > part.start]))
        if parts:
            batch = self._batches.begin(parts)
            self._issuer.order(Run(batch.number, batch.parts))
        self.pump()
        self.step_count += 1
        return StepResult((), chunks, 0, ((),) * len(chunks))

    def _next_parts(self) -> tuple[Part, ...]:
        is_full = len(self._batches) >= self.stages.count + AHEAD or self.stages.is_behind
        if is_full or not self._prompts.has_chunks:
            return ()
        first = self._prompts.first()
        done = 0 if first is None else first.prefilled_count
        longest = self.offload.sizes.length_max
        on_device = self._issuer.stage.runner.model.device.type != "cpu"
        most = positions_max(longest, on_device=on_device)
        return self._prompts.parts(self._sizer.next(done, longest - done), most)

    def _chunk(self, part: Part) -> Chunk:
        prompt = self._prompts.get(part.number)
        assert prompt is not None, f"a chunk of prompt {part.number}, which is not open"
        return Chunk(prompt.request, part.start, part.stop)

    def _enter(self, request: Request) -> None:
        """Opens the prompt, or enters what has loaded; a prompt that can never fit ends."""
        act = self._openings.resume if request.has_loaded else self._openings.open
        act(request)
        if request.refusal is not None:
            self._finish(request, "refused")

    # ---- reports

    def pump(self) -> None:
        """Moves handoffs on, and acts on the stages' reports."""
        for stage, report in self._issuer.reports():
            self._handle(stage, report)
        self.stages.flush()

    def learn(self) -> None:
        """Does nothing: stages report chunks when they are done."""

    def stand_by(self) -> None:
        """Does nothing: no other engine waits for a pipeline."""

    @property
    def rest_s(self) -> float:
        return math.inf

    def _handle(self, stage: int, report: Report) -> None:
        match report:
            case Ran(number, seconds):
                self._on_ran(stage, number, seconds)
            case Counted():
                if self._openings.counted(stage, report):
                    self._admission.ask_again()
            case Released():
                self._on_released(stage, report)
            case _:
                raise AssertionError(f"stage {stage} reports {report} in the middle")

    def _on_ran(self, stage: int, number: int, seconds: float) -> None:
        batch = self._batches.ran(stage, number, seconds, now_s=self._clock.now_s())
        if self._batches.is_through(batch) and batch.count is not None:
            self._sizer.observe(batch.done, batch.count, max(batch.seconds.values()))
        if stage == self.stages.count - 1:
            for part in batch.parts:
                self._chunk_done(part)

    def _chunk_done(self, part: Part) -> None:
        """The chunk has passed the last stage."""
        prompt = self._prompts.get(part.number)
        if prompt is None or prompt.request.reason is not None:
            return
        prompt.request.prefilled_count = part.stop
        if part.is_last:
            prompt.made_s = self._clock.now_s()
            self._send(prompt.request)

    def _send(self, request: Request) -> None:
        """Ends the request as sent, and with it followers to the same destination; admits
        others."""
        followers = self._intake.followers.release(request)
        self._finish(request, "sent")
        for follower in followers:
            self._roster.add(follower)
            if follower.gives == request.gives:
                self._finish(follower, "sent")

    def _give_up(self, prompt: Prompt) -> None:
        self._issuer.order(GiveUp(prompt.number))
        self._prompts.give_up(prompt)

    def _on_released(self, stage: int, report: Released) -> None:
        """Comes after the stage's `Ran`, as every stage reports in order."""
        prompt = self._prompts.get(report.number)
        assert prompt is not None, f"stage {stage} released {report.number}, which is not open"
        assert stage not in prompt.released, f"stage {stage} released {report.number} twice"
        prompt.released[stage] = report
        if len(prompt.released) == self.stages.count:
            self.ended_handoffs.append(prompt.ending(self._clock.now_s()))
            self._issuer.order(Close(prompt.number))
            self._prompts.remove(prompt)
            self._admission.ask_again()


def _check_options(request: Request) -> None:
    if request.gives is None or request.takes is not None:
        raise BadInput("this worker only computes prompts for others: a request must give its rows")
    if not 0 <= request.gives <= UID_MAX:
        raise BadInput(f"handoff {request.gives}: its number must be 0 to {UID_MAX}")
    if len(request.salt) > SALT_BYTES_MAX:
        raise BadInput(f"the salt has {len(request.salt)} bytes, at most {SALT_BYTES_MAX}")
