"""The server's end of the wire to the engine process.

A `Call` is one HTTP request's requests to the engine, one or several. The link sends them, hands
pieces out, and is told of an engine's end. A server of several processes, its fronts, has a link in
each; what concerns the requests of all fronts is asked of the engine.

An engine that replaces a lost one has its own endpoint, so that no message of the lost one is taken
for the new one's. Request numbers continue. Calls in the journal wait while the engine is
restarted, and then continue; the others have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import zmq.asyncio

from ess.clock import Clock
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
from ess.server.process.engines.engine_state import EngineState
from ess.server.process.requests.call import Call
from ess.server.process.requests.journal import NO_RECOVERY, Journal, Recovery
from ess.server.process.requests.open_calls import ALONE, FrontPlace, OpenCalls
from ess.server.process.requests.questions import Question, Questions


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
        self.engine = EngineState(clock)
        self.on_cut: Callable[[int], None] = lambda front: None
        self.on_fault: Callable[[str], None] = lambda sentence: None
        self.resumed_count = self.going_on_count = 0
        self._socket = EngineSocket(context, endpoint)
        self._recovery = recovery
        journal = Journal(recovery.bytes_max, self._socket.packer)
        self.calls = OpenCalls(place, clock, journal)
        self._waiting: asyncio.TimerHandle | None = None
        self._board = board
        self._questions = Questions()

    # ---- for the routes

    @property
    def open_count(self) -> int:
        return len(self.calls)

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
        names: Sequence[str] = (),
        priority: int = 0,
        salt: str = "",
        handoffs: Sequence[Handoff] = (),
    ) -> Call:
        """Starts one engine request per prompt, all in one call; a prompt that comes again, as the
        same list, is a further choice. `handoffs` is empty, or has one per prompt, for its first
        choice."""
        if self.engine.state in ("restarting", "lost"):
            raise Interrupted(self.engine.why_lost)
        call = self.calls.numbered(request_id, prompts, names=names)
        try:
            for add in _adds(call, prompts, handoffs, priority=priority, salt=salt):
                self.calls.add(call, add, self._socket.send(add))
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
        if self.calls.remove(number):
            with contextlib.suppress(Unavailable):
                self._socket.send(Abort(number))
            call.put(Piece(number, reason="cancelled"))
            call.nudge()

    async def abort_ids(self, request_ids: set[str] | None) -> int:
        """Aborts by the ids that clients know; None means all. Returns how many were met, of each
        call.

        This link's own are aborted first, so that the engine does not count them again."""
        own = self.calls.named(request_ids)
        for call, number in own:
            self.abort_one(call, number)
        met = len({(call, call.name_of(number)) for call, number in own})
        if self.place.count == 1 or self.engine.state != "ready":
            return met
        names = None if request_ids is None else frozenset(request_ids)
        answer = await self._ask("abort", AbortNamed(names, self.place.front))
        assert isinstance(answer, Aborted), f"{answer} answers an abort"
        return met + answer.count

    async def flush(self) -> str:
        """Forgets cached prefixes; returns why it cannot, if it cannot."""
        self.engine.require_ready("nothing can be flushed")
        answer = await self._ask("flush", Flush(self.place.front))
        assert isinstance(answer, Flushed), f"{answer} answers a flush"
        return answer.sentence

    async def hold(self, *, is_on: bool) -> None:
        """Has the engine run no step, or run steps again."""
        self.engine.require_ready("nothing can be paused or continued")
        answer = await self._ask("hold", Hold(is_on, self.place.front))
        assert isinstance(answer, Held), f"{answer} answers a Hold"

    async def meet(self, address: str, metadata: bytes) -> Met:
        """Passes another worker's metadata to the engine; returns the engine's own for it."""
        self.engine.require_ready("it cannot connect to other workers")
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
        self.engine.require_ready("nothing can be traced")
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
            self._hear(message)
            await asyncio.sleep(0)

    def interrupt(self, sentence: str) -> None:
        """The engine is lost and will be replaced: calls that cannot continue end with the
        sentence, and no other may start before the next engine is ready."""
        if self.engine.state in ("starting", "ready"):
            self.calls.lose_engine()
            self._end("restarting", sentence)
            wait_s = self._recovery.wait_s
            self._waiting = asyncio.get_running_loop().call_later(wait_s, self._give_up)

    def renew(self, endpoint: str) -> None:
        """Listens to another engine from now on. `run` must not be running. OSError if there can be
        no socket now."""
        self._socket.renew(endpoint)
        self.engine.renew()

    def lose(self, sentence: str) -> None:
        """There will be no engine: every call ends with the sentence, and no other may start."""
        if self.engine.state != "lost":
            self._end("lost", sentence)

    def _give_up(self) -> None:
        """Ends the calls that wait for another engine."""
        late = f"no other was ready within {self._recovery.wait_s:g} s"
        self.calls.fail(f"{self.engine.why_lost}; {late}")

    def _end(self, state: Literal["restarting", "lost"], sentence: str) -> None:
        self.engine.end(state, sentence)
        self._board.forget()
        self._stop_waiting()
        self.calls.fail(sentence, spares_recorded=state == "restarting")
        self._questions.fail(Interrupted(sentence))

    def stop(self) -> None:
        with contextlib.suppress(Unavailable):
            self._socket.send(Stop())

    def close(self) -> None:
        self._socket.close()

    def check(self) -> None:
        self.engine.check()
        self.calls.check()
        is_lost = self.engine.state == "lost"
        assert not (is_lost and self.open_count), f"{self.open_count} requests, no engine"

    def _bound_unread(self) -> None:
        while (call := self.calls.furthest_behind()) is not None:
            self.abort(call)
            self.calls.cut(call)

    def _resend_records(self) -> None:
        """Sends all records to the new engine, behind the lost one's word on whether steps are
        held. If the new one is lost meanwhile, the next one gets them."""
        self._stop_waiting()
        self.going_on_count = 0
        said = self.engine.holding
        with contextlib.suppress(Unavailable):
            if said.at_s:
                self._socket.send(Hold(said.is_on, self.place.front, said.at_s))
            for add in self.calls.again():
                self._socket.send(add)
                self.going_on_count += 1
        self.resumed_count += self.going_on_count

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _hear(self, message: FromEngine) -> None:
        was_restarting = self.engine.state == "restarting"
        self.engine.hear(message)
        match message:
            case Progress(pieces, at_s):
                self.calls.deliver(pieces, heard_at_s=self.engine.heard_at_s, left_at_s=at_s)
                self._bound_unread()
            case Status():
                self._board.publish(message)
            case Ready():
                if was_restarting:
                    self._resend_records()
            case Flushed() | Held() | Tracing() | Traced() | Aborted() | Met():
                self._questions.answer(message)
            case Cut(front):
                self.on_cut(front)
            case Fault(sentence):
                self.on_fault(sentence)  # which counts the calls that end here
                self.interrupt(f"the engine is gone: {sentence}")


def _adds(
    call: Call,
    prompts: Sequence[tuple[list[int], Sampling]],
    handoffs: Sequence[Handoff],
    *,
    priority: int,
    salt: str,
) -> Iterator[Add]:
    """The messages of a call. A prompt that comes again follows the request with it."""
    leaders: dict[int, int] = {}
    left = iter(handoffs)
    for number, (prompt, sampling) in zip(call.numbers, prompts, strict=True):
        first = leaders.setdefault(id(prompt), number)
        leader = None if first == number else first
        handoff = next(left, None) if leader is None else None
        name = call.name_of(number)
        yield Add(
            number, prompt, sampling, priority, leader, name, salt, handoff, call=call.request_id
        )
