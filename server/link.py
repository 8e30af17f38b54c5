"""The server's end of the wire to the engine process.

A `Call` is what one HTTP request wants of the engine: one or several requests there, whose pieces
arrive in one mailbox. The link numbers requests, hands pieces out, and is the only place that
knows whether the engine is loading, ready or lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import zmq
import zmq.asyncio

from ess.clock import Clock
from ess.engine.messages import (
    Abort,
    Add,
    Fault,
    Flush,
    Flushed,
    FromEngine,
    Packer,
    Piece,
    Progress,
    Ready,
    Status,
    Stop,
    ToEngine,
    Trace,
    Traced,
)
from ess.engine.sampling import Sampling
from ess.engine.wire import UNREAD_MAX
from ess.errors import BadState, Unavailable
from ess.server.board import Board

State = Literal["starting", "ready", "lost"]


class Call:
    """The engine's requests of one HTTP request.

    `pending` are those that have not ended. The oldest piece of those taken last left the engine at
    `made_at_s`, 0 if nobody knows, and arrived at `heard_at_s`.
    """

    def __init__(self, request_id: str, numbers: range, *, started_s: float) -> None:
        self.request_id = request_id
        self.started_s = started_s
        self.numbers = numbers
        self.pending = set(numbers)
        self.error: str | None = None
        self.made_at_s = self.heard_at_s = 0.0
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, piece: Piece, *, at_s: float = 0.0, heard_at_s: float = 0.0) -> None:
        if not self._pieces:
            self.made_at_s, self.heard_at_s = at_s, heard_at_s
        self._pieces.append(piece)
        if piece.reason is not None:
            self.pending.discard(piece.number)
        self.nudge()

    def fail(self, sentence: str) -> None:
        self.error = sentence
        self.nudge()

    def nudge(self) -> None:
        """Let the reader go on, with nothing if nothing has come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Piece]:
        """All pieces that have come; waits for the first unless it is nudged.

        What came before a failure is given out first, then Unavailable is raised.
        """
        if not self._pieces and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._pieces and self.error is not None:
            raise Unavailable(f"the engine is gone: {self.error}")
        taken, self._pieces = self._pieces, []
        return taken


class EngineLink:
    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        board: Board,
        clock: Clock,
    ) -> None:
        self._packer = Packer()
        self._board = board
        self._clock = clock
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, UNREAD_MAX)
        self._socket.bind(endpoint)
        self._calls: dict[int, Call] = {}
        self._next_number = 0
        self._flushing: list[asyncio.Future[str]] = []
        self._is_tracing = False
        self._traced: asyncio.Future[Traced] | None = None
        self.state: State = "starting"
        self.why_lost = ""
        self.ready: Ready | None = None
        self.became_ready = asyncio.Event()
        self.heard_at_s = clock.now_s()

    # ---- for the routes

    @property
    def open_count(self) -> int:
        return len(self._calls)

    @property
    def calls(self) -> Mapping[int, Call]:
        """By the number of the engine's request."""
        return self._calls

    def start(
        self,
        request_id: str,
        prompts: Sequence[tuple[list[int], Sampling]],
        *,
        priority: int = 0,
    ) -> Call:
        """One engine request per prompt, all in one call; a prompt that comes again, the same list,
        is another choice."""
        if self.state == "lost":
            raise Unavailable(f"the engine is gone: {self.why_lost}")
        numbers = range(self._next_number, self._next_number + len(prompts))
        self._next_number = numbers.stop
        call = Call(request_id, numbers, started_s=self._clock.now_s())
        try:
            leaders: dict[int, int] = {}
            for number, (prompt, sampling) in zip(numbers, prompts, strict=True):
                first = leaders.setdefault(id(prompt), number)
                leader = None if first == number else first
                self._send(Add(number, prompt, sampling, priority, leader))
                self._calls[number] = call
        except Unavailable:
            self.abort(call)
            raise
        return call

    def abort(self, call: Call) -> None:
        """Give up what has not ended; harmless if all has."""
        for number in sorted(call.pending):
            self.abort_one(call, number)

    def abort_one(self, call: Call, number: int) -> None:
        """End one of the call's requests; the call hears of it as of any other ending."""
        if self._calls.pop(number, None) is not None:
            with contextlib.suppress(Unavailable):
                self._send(Abort(number))
            call.put(Piece(number, reason="cancelled"))

    def abort_ids(self, request_ids: set[str] | None) -> int:
        """Abort by the ids that clients know; None means all. Returns how many calls it met."""
        met = {
            id(call): call
            for call in self._calls.values()
            if request_ids is None or call.request_id in request_ids
        }
        for call in met.values():
            self.abort(call)
        return len(met)

    async def flush(self) -> str:
        """Forget cached prefixes; a sentence says why not, if not."""
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: nothing can be flushed")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._send(Flush())
        self._flushing.append(answer)
        return await answer

    def start_trace(self) -> None:
        """One at a time, whoever asked for it."""
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}: nothing can be traced")
        if self._is_tracing:
            raise BadState("a trace is being taken already; stop it first")
        self._send(Trace(True))
        self._is_tracing = True

    async def stop_trace(self) -> Traced:
        if not self._is_tracing:
            raise BadState("no trace is being taken; start one first")
        if self._traced is None:
            self._send(Trace(False))
            self._traced = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._traced)

    # ---- for the one who runs it

    async def run(self) -> None:
        """One message, then everybody's turn: a message that is there is received without waiting,
        so an engine that is faster than the readers would otherwise keep them from ever running."""
        while True:
            raw = await self._socket.recv()
            self.heard_at_s = self._clock.now_s()
            self._hear(self._packer.for_server(raw))
            await asyncio.sleep(0)

    def lose(self, sentence: str) -> None:
        """The engine is gone: every call ends with an error, no other may start."""
        if self.state == "lost":
            return
        self.state, self.why_lost = "lost", sentence
        self.became_ready.set()
        for call in set(self._calls.values()):
            call.fail(sentence)
        self._calls.clear()
        gone = Unavailable(f"the engine is gone: {sentence}")
        for answer in (*self._flushing, self._traced):
            if answer is not None and not answer.done():
                answer.set_exception(gone)

    def stop(self) -> None:
        with contextlib.suppress(Unavailable):
            self._send(Stop())

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: ToEngine) -> None:
        """The queue is unbounded, so this never waits; without a peer there is no queue."""
        sent = cast(
            "asyncio.Future[None]", self._socket.send(self._packer.pack(message), zmq.NOBLOCK)
        )
        if sent.done() and sent.exception() is not None:
            raise Unavailable("the engine does not listen")

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Progress(pieces, at_s):
                for piece in pieces:
                    self._deliver(piece, at_s)
            case Status():
                self._board.publish(message)
            case Ready():
                self.ready, self.state = message, "ready"
                self.became_ready.set()
            case Flushed(sentence):
                asker = self._flushing.pop(0) if self._flushing else None
                if asker is not None and not asker.done():
                    asker.set_result(sentence)
            case Traced():
                if self._traced is not None and not self._traced.done():
                    self._traced.set_result(message)
                self._is_tracing, self._traced = False, None
            case Fault(sentence):
                self.lose(sentence)

    def _deliver(self, piece: Piece, at_s: float) -> None:
        call = self._calls.get(piece.number)
        if call is None:
            return
        if piece.reason is not None:
            del self._calls[piece.number]
        call.put(piece, at_s=at_s, heard_at_s=self.heard_at_s)
