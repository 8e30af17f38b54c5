"""Two handoffs between two workers, one of which stops: what becomes of them, and of all that comes
behind.

Whatever the point: an answer is that of an engine alone, or an error of ours where the decode
worker is to refuse what does not come; when all is over neither worker holds a page, a slot, a
ticket, a transfer or a number; and the next handoff arrives.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, Final, Literal

from ess.engine.config import EngineConfig
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import Unavailable
from ess.transfer.transports.inprocess import Exchange
from tests.pd.rigs import alone
from tests.pd.stops.actors import Actor, Worker
from tests.support.checkpoints import tokens
from tests.support.manual_clock import ManualClock

Stop = Literal["kill"] | float
STOPS: Final[tuple[Stop, ...]] = ("kill", 0.2, 0.8, 7.0)
"""Killed, or still for so many seconds: less and more than a handoff waits, and so long that the
other one takes it for dead."""
POLICIES: Final = ("recompute", "refuse")
LIMIT_S: Final = 0.5
STEP_S: Final = 0.01
RARE_STEP_S: Final = 0.1
STEPS_MAX: Final = 3000
TEXT: Final = tokens(700, 512, seed=3)
PROMPTS: Final = (TEXT[:200], TEXT[:265], TEXT[300:500])
WISH: Final = Sampling(tokens_max=5, ignore_eos=True)
MTP: Final = 2


@functools.cache
def answers() -> list[list[int]]:
    return alone([(prompt, WISH) for prompt in PROMPTS], mtp=MTP)


class Pair:
    """`actors` are the prefill worker and the decode worker."""

    def __init__(self, transport: str, policy: str) -> None:
        self.clock, self._exchange, self._epoch = ManualClock(), Exchange(), 0
        self._transport = transport
        self._config = EngineConfig(
            chunk_tokens=64, promise="some", mtp=MTP, handoff_failure=policy
        )
        self.actors = [self.made(), self.made()]
        self.meet()

    def made(self) -> Actor:
        self._epoch += 1
        return Actor(
            lambda say: Worker(
                self._transport,
                self._epoch,
                self._config,
                exchange=self._exchange,
                clock=self.clock,
                limit_s=LIMIT_S,
                say=say,
            )
        )

    def meet(self) -> None:
        for ours, theirs in (self.actors, self.actors[::-1]):
            known = theirs.do(theirs.worker.port.metadata)
            ours.do(functools.partial(ours.worker.port.meet, known))

    def add(self, uid: int, prompt: list[int], *, take_first: bool) -> list[tuple[int, Any]]:
        """The legs, each with the place of its worker; None for one that its worker never got."""
        prefill, decode = self.actors
        take, give = Take(uid, prefill.worker.port.epoch), Sampling(tokens_max=1)
        legs = [
            (0, prefill.do(lambda: prefill.worker.engine.add(prompt, give, give=uid))),
            (1, decode.do(lambda: decode.worker.engine.add(prompt, WISH, take=take))),
        ]
        return legs[::-1] if take_first else legs

    def step(self, seconds: float = STEP_S) -> None:
        self.clock.advance(seconds)
        for actor in self.actors:
            actor.do(actor.worker.step)

    def settle(self) -> None:
        """Until nothing is to be done, and until all leases have ended."""
        for _ in range(STEPS_MAX):
            if all(actor.worker.is_quiet for actor in self.actors):
                break
            self.step()
        else:
            raise AssertionError(f"it goes on behind {STEPS_MAX} steps")
        for _ in range(3):
            self.clock.advance(LIMIT_S)
            self.step()
        self.meet()
        self.step()

    def end(self) -> None:
        for actor in self.actors:
            actor.end()


def play(
    transport: str, policy: str, *, side: int, stop: Stop, at: int, take_first: bool
) -> Counter[str] | None:
    """How legs ended; None where the worker at `side` has fewer points than `at`."""
    pair = Pair(transport, policy)
    try:
        pair.actors[side].at = at
        legs = _asked(pair, take_first=take_first)
        if not _stands(pair, side):
            return None
        if stop == "kill":
            legs = [leg for leg in legs if leg[0] != side]
            _replace(pair, side)
        else:
            _stand_still(pair, stop)
            pair.actors[side].go_on()
            for _ in range(3):
                pair.step()
            pair.meet()
        pair.settle()
        _check_left(pair)
        _check_next(pair)
        return Counter(_end_of(*leg, policy) for leg in legs if leg[1] is not None)
    finally:
        pair.end()


def _asked(pair: Pair, *, take_first: bool) -> list[tuple[int, Any]]:
    legs = pair.add(0, PROMPTS[0], take_first=take_first)
    for _ in range(3):
        pair.step()
    return legs + pair.add(1, PROMPTS[1], take_first=take_first)


def _stands(pair: Pair, side: int) -> bool:
    for _ in range(200):
        if pair.actors[side].stands:
            return True
        pair.step()
    return False


def _stand_still(pair: Pair, seconds: float) -> None:
    """The other one steps as always while it waits for a handoff, and then more rarely."""
    until_s = pair.clock.now_s() + seconds
    while (left_s := until_s - pair.clock.now_s()) > STEP_S / 2:
        waits = seconds - left_s < 2 * LIMIT_S
        pair.step(min(left_s, STEP_S if waits else RARE_STEP_S))


def _replace(pair: Pair, side: int) -> None:
    """The other one has some steps in which to notice, then a new worker comes."""
    pair.actors[side].kill()
    pair.actors[side] = pair.made()
    survivor = pair.actors[1 - side]
    for _ in range(5):
        pair.clock.advance(STEP_S)
        survivor.do(survivor.worker.step)
    pair.meet()


def _end_of(side: int, request: Request, policy: str) -> str:
    reason = request.reason
    assert reason is not None, f"request {request.number} is {request.state}"
    if side == 0:
        assert reason == "sent", f"{reason}: {request.refusal}"
    elif reason == "refused":
        assert policy == "refuse", f"refused: {request.refusal}"
        assert isinstance(request.refusal, Unavailable), repr(request.refusal)
    else:
        expected = answers()[PROMPTS.index(request.prompt)]
        assert request.output == expected, f"it says {request.output}, not {expected}"
    return f"{('give', 'take')[side]}: {reason}"


def _check_left(pair: Pair) -> None:
    for side, actor in enumerate(pair.actors):
        left = actor.do(actor.worker.left)
        assert not left, f"side {side} keeps {left}"


def _check_next(pair: Pair) -> None:
    """The pair works as if nothing had been, and rows come over the network again."""
    decode = pair.actors[1].worker
    landed_count = decode.port.counts.landed_count
    legs = pair.add(9, PROMPTS[2], take_first=False)
    pair.settle()
    assert legs[1][1].output == answers()[2], f"{legs[1][1].refusal}"
    assert decode.port.counts.landed_count == landed_count + 1, "the next handoff has not landed"
    _check_left(pair)
