"""What a process of the server knows of its engine: loading, ready or lost, and since when silent.

starting --Ready--> ready --interrupt--> restarting --Ready--> ready ...
             from each of them --lose--> lost, which is the end
"""

from __future__ import annotations

import asyncio
from typing import Literal

from ess.clock import Clock
from ess.engine.process.holding import Holding
from ess.engine.process.messages import FromEngine, Held, Progress, Ready, Status
from ess.errors import Unavailable

State = Literal["starting", "ready", "restarting", "lost"]


class EngineState:
    """`has_answered`: this engine has made a token or more. `holding` is the engine's last word on
    whether steps are held; a lost engine leaves its word to the next one."""

    def __init__(self, clock: Clock) -> None:
        self.state: State = "starting"
        self.why_lost = ""
        self.ready: Ready | None = None
        self.became_ready = asyncio.Event()
        self._was_lost = asyncio.Event()
        self.restart_count = 0
        self.heard_at_s = clock.now_s()
        self.has_answered = False
        self.holding = Holding()
        self._clock = clock

    @property
    def is_held(self) -> bool:
        return self.holding.is_on

    @property
    def silent_s(self) -> float:
        return self._clock.now_s() - self.heard_at_s

    def require_ready(self, sentence: str) -> None:
        """Unavailable if no engine can be asked; `sentence` says what cannot be done then."""
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: {sentence}")

    async def until_ready(self) -> Ready | None:
        """The engine's Ready, once there is one; None if there will be none."""
        while self.ready is None and self.state != "lost":
            await self.became_ready.wait()
        return self.ready

    async def until_lost(self, ready: Ready) -> None:
        """Waits until the engine that has said `ready` is lost."""
        if self.ready is ready:
            await self._was_lost.wait()

    def hear(self, message: FromEngine) -> None:
        """Takes from any message what it says of the engine."""
        self.heard_at_s = self._clock.now_s()
        match message:
            case Progress():
                self.has_answered = True
            case Status():
                self.holding.hear(is_on=message.is_held, at_s=message.held_at_s)
                self.has_answered |= message.made_count > 0
            case Held():
                self.holding.hear(is_on=message.is_on, at_s=message.at_s)
            case Ready() if self.state != "lost":
                self._begin(message)

    def _begin(self, ready: Ready) -> None:
        self.state, self.why_lost, self.ready = "ready", "", ready
        self.became_ready.set()
        self._was_lost.clear()

    def end(self, state: Literal["restarting", "lost"], sentence: str) -> None:
        self.state, self.why_lost, self.ready = state, sentence, None
        self._was_lost.set()
        if state == "lost":
            self.became_ready.set()
        else:
            self.became_ready.clear()

    def renew(self) -> None:
        """Another engine is loading."""
        assert self.state == "restarting", f"the engine is {self.state}, another comes"
        self.heard_at_s = self._clock.now_s()
        self.has_answered = False
        self.restart_count += 1

    def check(self) -> None:
        assert (self.ready is not None) == (self.state == "ready"), f"{self.state}: {self.ready}"
