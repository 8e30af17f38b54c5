"""How a request's prompt comes to the stages: opened, loaded from disk where it is there, entered.

Each verb is done by this stage first. What this stage refuses, the others never hear of.
"""

from __future__ import annotations

from typing import Final

from ess.clock import Clock
from ess.engine.requests.request import Request, State
from ess.engine.requests.roster import Roster
from ess.errors import BadInput, PoolFull, without_frames
from ess.prefill import orders
from ess.prefill.issuer import Issuer
from ess.prefill.orders import Enter, Load, Open
from ess.prefill.prompts import Prompt, Prompts
from ess.prefill.reports import Counted
from ess.units import PAGE_ROWS

OPEN_MAX: Final = 2048


class Openings:
    """A request whose prompt can never fit gets its `refusal`; the lead ends it."""

    def __init__(
        self, issuer: Issuer, prompts: Prompts, roster: Roster[Request], *, clock: Clock
    ) -> None:
        self._issuer = issuer
        self._prompts = prompts
        self._roster = roster
        self._clock = clock

    def open(self, request: Request) -> None:
        """Opens the prompt; PoolFull if it must wait."""
        assert request.gives is not None, f"request {request.number} gives no rows"
        if len(self._prompts) >= OPEN_MAX:
            sentence = f"all {OPEN_MAX} prompts are open; wait until a handoff has ended"
            raise PoolFull(limiter="handoffs", needed=1, free=0, sentence=sentence)
        stage = self._issuer.stage
        try:
            if self._prompts.has_uid(request.gives):
                raise BadInput(f"handoff {request.gives} is open already")
            load_max = stage.offload.count_on_disk(request.prompt, salt=request.salt)
            count = stage.open(
                request.number,
                request.prompt,
                uid=request.gives,
                salt=request.salt,
                load_max=load_max,
            )
        except (PoolFull, BadInput) as refusal:
            self._refuse(request, refusal)
            return
        self._order_open(request, request.gives, count, load_max)
        request.cached_count = request.prefilled_count = count
        state: State = "loading" if load_max else "prefilling"
        self._roster.move(request, state)
        self._prompts.add(
            Prompt(
                number=request.number,
                request=request,
                uid=request.gives,
                prefilled_count=count,
                opened_s=self._clock.now_s(),
                state=state,
            )
        )

    def _order_open(self, request: Request, uid: int, cached_count: int, load_max: int) -> None:
        *texts, last = orders.cut(request.prompt)
        for text in texts:
            self._issuer.stages.order(orders.Text(request.number, text))
        self._issuer.stages.order(
            Open(
                number=request.number,
                uid=uid,
                cached_count=cached_count,
                load_max=load_max,
                salt=request.salt,
                tokens=last,
            )
        )

    def _refuse(self, request: Request, refusal: PoolFull | BadInput) -> None:
        """The request keeps the refusal, unless it may wait: then raises it."""
        if isinstance(refusal, PoolFull) and not refusal.permanent:
            raise refusal
        request.refusal = without_frames(refusal)

    def counted(self, stage: int, report: Counted) -> bool:
        """Records how many pages the stage has on disk. When all stages have said so, loads the
        pages that all of them have and returns True; the others are computed. The prompt may have
        been given up while its pages came."""
        prompt = self._prompts.get(report.number)
        if prompt is None:
            return False
        assert stage not in prompt.counted, f"stage {stage} counted {report.number}'s pages twice"
        prompt.counted[stage] = report.page_count
        if len(prompt.counted) < self._issuer.stages.count:
            return False
        self._load(prompt, min(prompt.counted.values()))
        return True

    def _load(self, prompt: Prompt, page_count: int) -> None:
        self._issuer.order(Load(prompt.number, page_count))
        request = prompt.request
        request.cached_count += page_count * PAGE_ROWS
        prompt.prefilled_count = request.prefilled_count = request.cached_count
        request.has_loaded = True
        self._roster.move(request, "preempted")

    def resume(self, request: Request) -> None:
        """The prompt has loaded: enters it. PoolFull if it must wait for room on the device."""
        prompt = self._prompts.get(request.number)
        assert prompt is not None, f"request {request.number} has loaded, and is not open"
        try:
            self._issuer.stage.enter(request.number)
        except (PoolFull, BadInput) as refusal:
            self._refuse(request, refusal)
            return
        self._issuer.stages.order(Enter(request.number))
        request.has_loaded = False
        self._roster.move(request, "prefilling")
        self._prompts.enter(prompt)
