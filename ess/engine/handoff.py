"""The engine's part in handoffs: rows of prompts that leave for other workers or come from them.

    give   offered when the request is admitted, told layer by layer what is made, and taken over by
           the port when the prompt is there: rows that were not fetched by then wait there
    take   expected when the request is admitted; then the port says once that it landed or missed

The port moves the bytes, inside `pump` alone: between steps, between the layers of a step, and
while the host waits for a device. The engine says what becomes of a request.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Protocol

from torch import Tensor

from ess.door import Sequence as Opened
from ess.door.handoff.endings import Landed, Lapsed, Missed, Sent, Timeline
from ess.engine.config import EngineConfig
from ess.engine.plan import Chunk
from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.step.invented import invent
from ess.engine.step.runner import Runner
from ess.errors import BadInput
from ess.transfer.messages import UID_MAX

Ended = Landed | Missed | Sent | Lapsed
ENDED_MAX: Final = 32
SALT_BYTES: Final = 16
PAUSE_S: Final = 2e-4
"""Between two pumps of a host that waits for a device: few megabytes come in that time."""


class Arrivals(Protocol):
    """What a receiver does for an engine (`door.handoff.receiver`)."""

    def expect(self, sequence: Opened, *, uid: int, peer: int) -> object: ...

    def give_up(self, uid: int) -> None: ...

    def outcomes(self) -> list[Landed | Missed]: ...


class Departures(Protocol):
    """What a sender does (`door.handoff.sender`)."""

    def offer(self, uid: int, sequence: Opened, *, prompt: Sequence[int], salt: bytes) -> None: ...

    def made(self, uid: int, layer: int, stop: int) -> None: ...

    def finish(self, uid: int, windows: Any) -> None: ...

    def give_up(self, uid: int) -> None: ...

    def outcomes(self) -> list[Sent | Lapsed]: ...


class Exchange(Protocol):
    """A port, or its counterpart in an engine of several processes."""

    @property
    def receiver(self) -> Arrivals: ...

    @property
    def sender(self) -> Departures: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def now_s(self) -> float: ...

    def pump(self) -> None: ...


class Handoffs:
    """`_coming` are requests whose rows are awaited, `_claimed` those that give theirs, `_offered`
    what the port knows of these, all by the number of the handoff; `_told` are requests of which
    the engine has still to hear, each with the fault if its rows do not come. `ended` are the last
    handoffs that are over, the newest last; a handoff that has landed is over with the first step
    of its request, and until then waits in `_landed`, by the number of the request. `on_end` is
    called when the port has told of an end, and before the engine hears of a request: there may be
    room."""

    def __init__(
        self,
        port: Exchange | None,
        runner: Runner,
        config: EngineConfig,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self._port = port
        self._runner = runner
        self._serves_fakes = config.fake_prefill
        self._on_end = on_end
        self._coming: dict[int, Request] = {}
        self._claimed: dict[int, Request] = {}
        self._offered: dict[int, Request] = {}
        self._told: deque[tuple[Request, str]] = deque()
        self._landed: dict[int, Landed] = {}
        self.ended: deque[Ended] = deque(maxlen=ENDED_MAX)
        if port is not None:
            runner.on_layer = port.pump

    @property
    def is_busy(self) -> bool:
        """Rows are under way, or wait to be fetched: the port is to be pumped soon."""
        return self.has_told or (self._port is not None and self._port.is_busy)

    @property
    def has_told(self) -> bool:
        """Whether some request continues in the next step."""
        return bool(self._told)

    def equip(self, request: Request) -> None:
        """BadInput if there is no such handoff here. Invented rows get a random salt, so that no
        other request meets them in the prefix cache; followers share it and are forked."""
        takes = request.takes
        if request.gives is not None and takes is not None:
            raise BadInput(f"handoff {request.gives} gives the rows that {takes.uid} takes")
        if takes is not None and takes.fake and not self._serves_fakes:
            raise BadInput("invented rows are asked for, and fake_prefill is off")
        uid = request.gives if takes is None else takes.uid
        if uid is not None and not 0 <= uid <= UID_MAX:
            raise BadInput(f"handoff {uid}: its number must be 0 to {UID_MAX}")
        if self._port is None and (request.gives is not None or (takes and not takes.fake)):
            raise BadInput("this engine takes part in no handoffs")
        if takes is not None and takes.fake:
            leader = request.leader
            request.salt = leader.salt if leader else secrets.token_bytes(SALT_BYTES)

    def begin(self, request: Request, opened: Opened) -> None:
        """The request is admitted, and no other request may use its number until it ends. Where
        that number is taken, or the offer of its rows raises, `opened` is closed again. What loads
        is offered later."""
        with ExitStack() as undo:
            undo.callback(opened.close)
            if request.gives is not None:
                if self._claimed.setdefault(request.gives, request) is not request:
                    raise BadInput(f"handoff {request.gives} is open already")
                if not opened.is_loading:
                    self._offer(request.gives, request, opened)
            elif request.lands:
                self._expect(request, opened)
            undo.pop_all()

    def offer(self, request: Request) -> None:
        """The request has loaded and is on the device. Where the offer of its rows raises, it is
        not, and tries again later."""
        assert request.sequence is not None, f"request {request.number} has no rows"
        if request.gives is None:
            return
        with ExitStack() as undo:
            undo.callback(request.sequence.preempt)
            self._offer(request.gives, request, request.sequence)
            undo.pop_all()

    def _offer(self, uid: int, request: Request, opened: Opened) -> None:
        assert self._port is not None, f"request {request.number} gives rows without a port"
        self._port.sender.offer(uid, opened, prompt=request.prompt, salt=request.salt)
        self._offered[uid] = request

    def _expect(self, request: Request, opened: Opened) -> None:
        """Registers rows that are to come; a request whose rows can never come fails at once."""
        takes = request.takes
        assert takes is not None, f"request {request.number} takes no rows"
        if takes.fake:
            invent(self._runner, opened)
            self._runner.offload.owner.pools.latent.say()
            self._told.append((request, ""))
            return
        assert self._port is not None, f"request {request.number} takes rows without a port"
        try:
            self._port.receiver.expect(opened, uid=takes.uid, peer=takes.peer)
        except BadInput as error:
            began = Timeline(self._port.now_s, ())
            self.ended.append(Missed(takes.uid, str(error), began))
            self._told.append((request, f"handoff {takes.uid}: {error}"))
        else:
            self._coming[takes.uid] = request

    def heard(self) -> Iterator[tuple[Request, str]]:
        """Moves what can be moved; then each request whose rows have come, with an empty text, or
        will not come, with the reason. That is no fault where the prefix cache had all that is
        needed."""
        if self._port is not None:
            self._port.pump()
            sent, came = self._port.sender.outcomes(), self._port.receiver.outcomes()
            self.ended += sent
            for outcome in came:
                self._hear(outcome)
            if sent or came:
                self._on_end()
        while self._told:
            self._on_end()
            request, fault = self._told.popleft()
            has_all = request.is_prefilled and not self._runner.offload.layout.has_states
            yield request, "" if has_all else fault

    def move_until(self, is_over: Callable[[], bool]) -> None:
        """Moves rows while the host has to wait for something else, which it then learns late by
        one pump and one pause at most."""
        while self._port is not None and self._port.is_busy and not is_over():
            self._port.pump()
            time.sleep(PAUSE_S)

    def _hear(self, outcome: Landed | Missed) -> None:
        request = self._coming.pop(outcome.uid, None)
        if request is not None and isinstance(outcome, Landed):
            request.windows = outcome.windows
            self._landed[request.number] = replace(outcome, windows=([], 0))
            self._told.append((request, ""))
            return
        self.ended.append(outcome)
        if request is not None and isinstance(outcome, Missed):
            self._told.append((request, f"handoff {outcome.uid}: {outcome.sentence}"))

    def mark(self, request: Request, moment: str) -> None:
        """Notes an event of a request whose rows have landed, for the handoff's time line."""
        landed = self._landed.get(request.number)
        if landed is not None:
            assert self._port is not None, f"request {request.number} has landed without a port"
            timeline = landed.timeline.marked(moment, self._port.now_s)
            self._landed[request.number] = replace(landed, timeline=timeline)

    def stepped(self, request: Request) -> None:
        """The request has made tokens: its first, if it has landed."""
        if request.number in self._landed:
            self.mark(request, "first step")
            self.close(request)

    def close(self, request: Request) -> None:
        """The request has made its first tokens, or will make none."""
        landed = self._landed.pop(request.number, None)
        if landed is not None:
            self.ended.append(landed)

    def while_made(self, chunks: Sequence[Chunk]) -> Callable[[int], None] | None:
        """The function to call with each layer whose rows of these chunks are stored."""
        port = self._port
        if port is None:
            return None
        given = [(chunk.request.gives, chunk.stop) for chunk in chunks]

        def stored(layer: int) -> None:
            for uid, stop in given:
                if uid is not None:
                    port.sender.made(uid, layer, stop)
            port.pump()

        return stored

    def send(self, request: Request, windows: Tensor | None) -> None:
        """The prompt is there, and is the port's from now on."""
        assert self._port is not None, f"request {request.number} gives rows without a port"
        assert request.gives is not None, f"request {request.number} gives no rows"
        self._port.sender.finish(request.gives, None if windows is None else windows.numpy())
        del self._offered[request.gives], self._claimed[request.gives]
        request.sequence = None

    def give_up(self, request: Request) -> None:
        """The request ends, perhaps before its handoff has."""
        self.close(request)
        if request.takes is not None and self._coming.get(request.takes.uid) is request:
            assert self._port is not None, f"request {request.number} takes rows without a port"
            del self._coming[request.takes.uid]
            self._port.receiver.give_up(request.takes.uid)
        if request.gives is not None and self._claimed.get(request.gives) is request:
            del self._claimed[request.gives]
        if request.gives is not None and self._offered.get(request.gives) is request:
            assert self._port is not None, f"request {request.number} gives rows without a port"
            del self._offered[request.gives]
            self._port.sender.give_up(request.gives)
        self._told = deque(told for told in self._told if told[0] is not request)

    def check(self, roster: Roster[Request]) -> None:
        landing = {*self._coming.values(), *(request for request, _ in self._told)}
        assert landing == {*roster.of("landing")}, "a request lands that awaits no rows"
        for uid, request in self._offered.items():
            assert request.gives == uid, f"handoff {uid} is not request {request.number}'s"
            assert self._claimed[uid] is request, f"handoff {uid} is another request's"
        for uid, request in self._coming.items():
            assert request.takes is not None, f"request {request.number} takes no rows"
            assert request.takes.uid == uid, f"handoff {uid} is request {request.number}'s"
