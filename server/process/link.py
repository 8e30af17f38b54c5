"""The server's end of the wire to the engine process.

A `Call` is one HTTP request's requests to the engine, one or several. The link numbers requests,
hands pieces out, and is the only place that knows whether the engine is loading, ready or lost. A
server of several processes, its fronts, has a link in each; what concerns the requests of all
fronts is asked of the engine.

    starting --Ready--> ready --interrupt--> restarting --Ready--> ready ...
                 from each of them --lose--> lost, which is the end

An engine that replaces a lost one has its own endpoint, so that no message of the lost one is taken
for the new one's. Request numbers continue. Calls in the journal wait while the engine is
restarted, and then continue; the others have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import zmq.asyncio

from ess.clock import Clock
from ess.engine.process.holding import Holding
from ess.engine.process.messages import (
    Abort,
    Aborted,
    AbortNamed,
    Add,
    Answered,
    Cut,
    Fault,
    Flush,
    Flushed,
    FromEngine,
    Handoff,
    Held,
    Hold,
    Lost,
    Meet,
    Met,
    Piece,
    Progress,
    Ready,
    Status,
    Stop,
    ToEngine,
    Trace,
    Traced,
    Tracing,
)
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState, Unavailable
from ess.server.http.responses import Interrupted
from ess.server.process.board import Board
from ess.server.process.engines.engine_socket import EngineSocket
from ess.server.process.requests.call import Call
from ess.server.process.requests.journal import NO_RECOVERY, Journal, Recovery
from ess.server.process.requests.questions import Question, Questions
from ess.server.process.tally import Waits

State = Literal["starting", "ready", "restarting", "lost"]
LIVES: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPlace:
    """A process of the server. A front that replaces a lost front is the next `life` at its place,
    so that no number is used twice."""

    front: int = 0
    count: int = 1
    life: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.front < self.count, f"front {self.front} of {self.count}"

    @property
    def first_number(self) -> int:
        return self.front + self.count * self.life * LIVES


ALONE: Final = FrontPlace()


class EngineLink:
    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        board: Board,
        clock: Clock,
        place: FrontPlace = ALONE,
        recovery: Recovery = NO_RECOVERY,
    ) -> None:
        self.place = place
        self.on_cut: Callable[[int], None] = lambda front: None
        self.on_fault: Callable[[str], None] = lambda sentence: None
        self._socket = EngineSocket(context, endpoint)
        self._recovery = recovery
        self._journal = Journal(recovery.bytes_max, self._socket.packer)
        self._waiting: asyncio.TimerHandle | None = None
        self._board = board
        self._clock = clock
        self._calls: dict[int, Call] = {}
        self._next_number = place.first_number
        self._questions = Questions()
        self.state: State = "starting"
        self.why_lost = ""
        self.ready: Ready | None = None
        self.became_ready = asyncio.Event()
        self.restart_count = self.resumed_count = self.going_on_count = 0
        self.heard_at_s = clock.now_s()
        self.has_answered = False
        self._holding = Holding()
        self.to_socket = Waits()

    # ---- for the routes

    @property
    def is_held(self) -> bool:
        """Whether no step runs, by the engine's last word; an engine that is lost leaves its word
        to the next one."""
        return self._holding.is_on

    @property
    def open_count(self) -> int:
        return len(self._calls)

    @property
    def oldest_wait_s(self) -> float:
        """How long the oldest call without any piece from the engine has waited."""
        silent = [call.started_s for call in self._calls.values() if not call.heard_at_s]
        return self._clock.now_s() - min(silent) if silent else 0.0

    @property
    def open_elsewhere_count(self) -> int:
        """Open requests of the other fronts; the count may be a moment old."""
        counts = self._board.status.open_counts
        return sum(count for front, count in enumerate(counts) if front != self.place.front)

    def start(
        self,
        request_id: str,
        prompts: Sequence[tuple[list[int], Sampling]],
        *,
        priority: int = 0,
        salt: str = "",
        handoffs: Sequence[Handoff] = (),
    ) -> Call:
        """Starts one engine request per prompt, all in one call; a prompt that comes again, as the
        same list, is a further choice. `handoffs` is empty, or has one per prompt, for its first
        choice."""
        if self.state in ("restarting", "lost"):
            raise Interrupted(self.why_lost)
        step, first = self.place.count, self._next_number
        numbers = range(first, first + step * len(prompts), step)
        self._next_number = numbers.stop
        call = Call(
            request_id,
            numbers,
            started_s=self._clock.now_s(),
            prompt_count=sum(len(prompt) for prompt, _ in prompts),
        )
        try:
            leaders: dict[int, int] = {}
            left = iter(handoffs)
            for number, (prompt, sampling) in zip(numbers, prompts, strict=True):
                first = leaders.setdefault(id(prompt), number)
                leader = None if first == number else first
                handoff = next(left, None) if leader is None else None
                add = Add(number, prompt, sampling, priority, leader, request_id, salt, handoff)
                self._journal.open(add, self._socket.send(add))
                self._calls[number] = call
        except Unavailable:
            self.abort(call)
            raise
        return call

    def abort(self, call: Call) -> None:
        """Aborts what has not ended; harmless if all has."""
        for number in sorted(call.pending):
            self.abort_one(call, number)

    def abort_one(self, call: Call, number: int) -> None:
        """Ends one of the call's requests; the call gets its end like any other."""
        if self._calls.pop(number, None) is not None:
            self._journal.close(number)
            with contextlib.suppress(Unavailable):
                self._socket.send(Abort(number))
            call.put(Piece(number, reason="cancelled"))
            call.nudge()

    async def abort_ids(self, request_ids: set[str] | None) -> int:
        """Aborts by the ids that clients know; None means all. Returns how many calls were aborted.

        This link's own are aborted first, so that the engine does not count them again."""
        met_count = self._abort_own(request_ids)
        if self.place.count == 1 or self.state != "ready":
            return met_count
        names = None if request_ids is None else frozenset(request_ids)
        answer = await self._ask("abort", AbortNamed(names, self.place.front))
        assert isinstance(answer, Aborted), f"{answer} answers an abort"
        return met_count + answer.count

    def _abort_own(self, request_ids: set[str] | None) -> int:
        met = {
            id(call): call
            for call in self._calls.values()
            if request_ids is None or call.request_id in request_ids
        }
        for call in met.values():
            self.abort(call)
        return len(met)

    async def flush(self) -> str:
        """Forgets cached prefixes; returns why it cannot, if it cannot."""
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: nothing can be flushed")
        answer = await self._ask("flush", Flush(self.place.front))
        assert isinstance(answer, Flushed), f"{answer} answers a flush"
        return answer.sentence

    async def hold(self, *, is_on: bool) -> None:
        """Has the engine run no step, or run steps again."""
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: nothing can be paused or continued")
        answer = await self._ask("hold", Hold(is_on, self.place.front))
        assert isinstance(answer, Held), f"{answer} answers a Hold"

    async def meet(self, address: str, metadata: bytes) -> Met:
        """Passes another worker's metadata to the engine; returns the engine's own for it."""
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: it cannot connect to other workers")
        answer = await self._ask("meet", Meet(address, metadata, self.place.front))
        assert isinstance(answer, Met), f"{answer} answers a Meet"
        return answer

    async def start_trace(self) -> None:
        """Starts the only trace that all clients of all fronts share."""
        answer = await self._trace(True)
        assert isinstance(answer, Tracing), f"{answer} answers the start of a trace"
        if answer.sentence:
            raise BadState(answer.sentence)

    async def stop_trace(self) -> Traced:
        answer = await self._trace(False)
        if isinstance(answer, Tracing):
            raise BadState(answer.sentence)
        assert isinstance(answer, Traced), f"{answer} answers the end of a trace"
        return answer

    async def _trace(self, is_on: bool) -> Answered:
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: nothing can be traced")
        return await self._ask("trace", Trace(is_on, self.place.front))

    async def _ask(self, question: Question, message: ToEngine) -> Answered:
        self._socket.send(message)
        return await self._questions.ask(question)

    # ---- for the server

    def front_lost(self, front: int) -> None:
        """Tells the engine that another front has ended: it gives up its requests."""
        with contextlib.suppress(Unavailable):
            self._socket.send(Lost(front))

    async def run(self) -> None:
        """Receives messages. After each the other tasks get a turn: a message that has arrived is
        received without waiting, so an engine faster than the readers would keep them from
        running."""
        while True:
            message = await self._socket.receive()
            self.heard_at_s = self._clock.now_s()
            self._hear(message)
            await asyncio.sleep(0)

    async def until_ready(self) -> Ready | None:
        """The engine's Ready, once there is one; None if there will be none."""
        while self.ready is None and self.state != "lost":
            await self.became_ready.wait()
        return self.ready

    def interrupt(self, sentence: str) -> None:
        """The engine is lost and will be replaced: calls that cannot continue end with the
        sentence, and no other may start before the next engine is ready."""
        if self.state in ("starting", "ready"):
            self._journal.lose()
            self._end("restarting", sentence)
            self.became_ready.clear()
            wait_s = self._recovery.wait_s
            self._waiting = asyncio.get_running_loop().call_later(wait_s, self._give_up)

    def renew(self, endpoint: str) -> None:
        """Listens to another engine from now on. `run` must not be running."""
        assert self.state == "restarting", f"the engine is {self.state}, another comes"
        self._socket.renew(endpoint)
        self.heard_at_s = self._clock.now_s()
        self.has_answered = False
        self.restart_count += 1

    def lose(self, sentence: str) -> None:
        """There will be no engine: every call ends with the sentence, and no other may start."""
        if self.state != "lost":
            self._end("lost", sentence)
            self.became_ready.set()

    def _give_up(self) -> None:
        """Ends the calls that wait for another engine."""
        late = f"{self.why_lost}; no other was ready within {self._recovery.wait_s:g} s"
        for call in set(self._calls.values()):
            self._fail(call, late)

    def _fail(self, call: Call, sentence: str) -> None:
        for number in call.pending:
            self._calls.pop(number, None)
            self._journal.close(number)
        call.fail(sentence)

    def _end(self, state: State, sentence: str) -> None:
        self.state, self.why_lost, self.ready = state, sentence, None
        self._board.forget()
        self._stop_waiting()
        for call in set(self._calls.values()):
            if state == "lost" or not all(number in self._journal for number in call.pending):
                self._fail(call, sentence)
        self._questions.fail(Interrupted(sentence))

    def stop(self) -> None:
        with contextlib.suppress(Unavailable):
            self._socket.send(Stop())

    def close(self) -> None:
        self._socket.close()

    def check(self) -> None:
        for number, call in self._calls.items():
            assert number in call.pending, f"request {number} has ended and is listed"
            assert number % self.place.count == self.place.front, f"{number}: another front's"
            assert number < self._next_number, f"{number}: the next is {self._next_number}"
        assert (self.ready is not None) == (self.state == "ready"), f"{self.state}: {self.ready}"
        assert not (self._calls and self.state == "lost"), f"{len(self._calls)} calls, no engine"
        self._journal.check()

    def _resend_records(self) -> None:
        """Sends all records to the new engine, behind the lost one's word on whether steps are
        held. If the new one is lost meanwhile, the next one gets them."""
        self._stop_waiting()
        self.going_on_count = 0
        with contextlib.suppress(Unavailable):
            if self._holding.at_s:
                said = self._holding
                self._socket.send(Hold(said.is_on, self.place.front, said.at_s))
            for add in self._journal.again():
                self._socket.send(add)
                self.going_on_count += 1
        self.resumed_count += self.going_on_count

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Progress(pieces, at_s):
                self.has_answered = True
                self._deliver(pieces, at_s)
            case Status():
                self._holding.hear(is_on=message.is_held, at_s=message.held_at_s)
                self.has_answered |= message.made_count > 0
                self._board.publish(message)
            case Ready():
                is_next = self.state == "restarting"
                self.ready, self.state, self.why_lost = message, "ready", ""
                self.became_ready.set()
                if is_next:
                    self._resend_records()
            case Flushed() | Held() | Tracing() | Traced() | Aborted() | Met():
                if isinstance(message, Held):
                    self._holding.hear(is_on=message.is_on, at_s=message.at_s)
                self._questions.answer(message)
            case Cut(front):
                self.on_cut(front)
            case Fault(sentence):
                self.interrupt(f"the engine is gone: {sentence}")
                self.on_fault(sentence)

    def _deliver(self, pieces: Sequence[Piece], at_s: float) -> None:
        """Hands all pieces out before a waiter is woken: all choices leave together."""
        waiting: list[Call] = []
        for piece in pieces:
            call = self._calls.get(piece.number)
            if call is None:
                continue
            if piece.reason is not None:
                del self._calls[piece.number]
            if call.put(self._journal.hear(piece), heard_at_s=self.heard_at_s):
                waiting.append(call)
        for call in waiting:
            call.tell()
        if at_s:
            asyncio.get_running_loop().call_soon(self._written, at_s, len(pieces))

    def _written(self, at_s: float, count: int) -> None:
        """The loop writes to sockets at the end of each turn, so by now the step's pieces are out;
        each counts as late as the last."""
        self.to_socket.add(self._clock.now_s() - at_s, count)
