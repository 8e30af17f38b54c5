"""What the loop of an engine process drives: an engine, or the lead of a pipeline of stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Unpack

from ess.door import Offload
from ess.engine.handoff import Ended
from ess.engine.layers.verifier import Verifier
from ess.engine.plan import StepResult
from ess.engine.process.messages import ExpertLine, GraphLine, StageLine
from ess.engine.requests.intake import RequestOptions
from ess.engine.requests.request import Request
from ess.engine.step.tuning import Tuning
from ess.engine.step.warmth import Warmth
from ess.engine.tokens.sampling import Sampling
from ess.errors import PoolFull


class Driven(Protocol):
    offload: Offload
    step_count: int
    tuning: Tuning
    verifier: Verifier

    @property
    def preempted_count(self) -> int:
        """How often a request was set aside since the start."""

    def add(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request: ...

    def cancel(self, request: Request) -> None: ...

    def step(self) -> StepResult: ...

    def learn(self) -> None:
        """Waits for the steps under way; what they made comes with the next step."""

    def pump(self) -> None: ...

    def stand_by(self) -> None:
        """Called when the engine is idle: does the part of a step for which engines that share the
        experts wait."""

    @property
    def rest_s(self) -> float:
        """How long it may be left alone when it has nothing to do."""

    def forget_prefixes(self) -> None:
        """BadState while a request, or a handoff, holds cached pages."""

    def close(self) -> None: ...

    def depth_reasons(self) -> tuple[str, ...]: ...

    def stage_lines(self) -> tuple[StageLine, ...]:
        """The lines of the stages; none from an engine of one process."""

    def graph_line(self) -> GraphLine | None:
        """None where no step is a graph."""

    def expert_line(self) -> ExpertLine | None:
        """None where all experts are here."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_handing_over(self) -> bool: ...

    @property
    def refusal(self) -> PoolFull | None: ...

    @property
    def depth(self) -> int: ...

    @property
    def warmth(self) -> Warmth: ...

    @property
    def ended_handoffs(self) -> Iterable[Ended]: ...
