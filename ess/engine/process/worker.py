"""The engine's own process: messages in, steps, messages out.

    python -m ess.engine.process.worker ENDPOINT...     (a Launch as one JSON line on stdin)

Between two steps all messages that have arrived are obeyed; after a step its tokens leave in one
message. The parent process holds our stdin open: however the parent ends, stdin closes then, and
this process ends too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq

from ess.clock import Clock, RealClock
from ess.door.handoff.port import Port
from ess.engine.layers.spans import Recorder
from ess.engine.plan import NewTokens, StepResult
from ess.engine.process.build import Built, build
from ess.engine.process.driven import Driven
from ess.engine.process.holding import Holding
from ess.engine.process.kv_events import KvEvents, events_of
from ess.engine.process.lifeline import first_line, keep_objects, leave_objects
from ess.engine.process.messages import (
    Abort,
    Aborted,
    AbortNamed,
    Add,
    Fault,
    Flush,
    Flushed,
    Handoff,
    Held,
    Hold,
    Launch,
    Lost,
    Meet,
    Piece,
    Progress,
    Ready,
    Status,
    Stop,
    ToEngine,
    Trace,
    Tracing,
)
from ess.engine.process.peers import Peers
from ess.engine.process.status import LiveRequest, LoopCounts, in_words, status_of
from ess.engine.process.wire import Wire, open_wire
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.chance import Chance
from ess.errors import BadState, EssError, Unavailable
from ess.layout import ModelLayout

STATUS_EVERY_S: Final = 0.25
IDLE_S: Final = 0.25
BLOCKED_S: Final = 0.01
BUSY_S: Final = 0.001


class EngineLoop:
    """Owns the engine, or the lead of a pipeline."""

    def __init__(
        self,
        engine: Driven,
        wire: Wire,
        clock: Clock,
        *,
        port: Port | None = None,
        peers: Peers | None = None,
        events: KvEvents | None = None,
    ) -> None:
        self.peers = Peers(port) if peers is None else peers
        self._engine = engine
        self._port = port
        self._events = events
        if events is not None:
            engine.offload.follow_prefixes(events)
        self._wire = wire
        self._clock = clock
        self._live: dict[int, LiveRequest] = {}
        self._counts = LoopCounts()
        self._told_at_s = clock.now_s() - STATUS_EVERY_S
        self._is_blocked = False
        self._holding = Holding()
        self._recorder = Recorder(clock)
        self.is_stopped = False

    @property
    def layout(self) -> ModelLayout:
        return self._engine.offload.layout

    def run(self) -> None:
        while not self.is_stopped:
            self.turn()

    def turn(self) -> None:
        """Obey the messages that have arrived, run a step if a request needs one, report. While
        steps are held, all goes on that an idle engine does for others."""
        for message in self._wire.take(timeout_s=self._wait_s()):
            self._obey(message)
        if self._rests:
            self._engine.pump()
            self._engine.stand_by()
        elif not self.is_stopped:
            self._step()
            self._settle()
        if self._events is not None:
            self._events.flush()
        self._report()

    @property
    def _rests(self) -> bool:
        return self._holding.is_on or self._engine.is_idle

    def _wait_s(self) -> float:
        wait_s = IDLE_S if self._rests else BLOCKED_S if self._is_blocked else 0.0
        wait_s = min(wait_s, self._engine.rest_s)
        return min(wait_s, BUSY_S) if self._engine.is_handing_over else wait_s

    def _settle(self) -> None:
        """When idle, wait for outstanding copies."""
        if self._engine.is_idle:
            self._engine.offload.drain()

    def close(self) -> None:
        self._engine.close()
        if self._port is not None:
            self._port.close()
        self._engine.offload.close()
        if self._events is not None:
            self._events.close()

    # ---- what arrives

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort(number):
                self._cancel([number])
            case AbortNamed():
                self._wire.give(Aborted(self._abort(message), message.front))
            case Lost(front):
                count = self._wire.front_count
                self._cancel([number for number in self._live if number % count == front])
            case Flush(front):
                self._wire.give(Flushed(self._flush(), front))
            case Hold(is_on, front, None):
                self._hold(is_on=is_on, at_s=self._clock.now_s())
                self._wire.give(Held(is_on, front, self._holding.at_s))
            case Hold(is_on, _, float(said_at_s)):
                self._hold(is_on=is_on, at_s=said_at_s)
            case Trace(is_on, front):
                self._trace(is_on, front)
            case Meet():
                self._wire.give(self.peers.meet(message))
            case Stop():
                self.is_stopped = True

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            live = self._live.pop(number, None)
            if live is not None:
                self._engine.cancel(live.request)
        self._settle()

    def _abort(self, asked: AbortNamed) -> int:
        """Unlike Abort this does not come from the front that waits for the answer, so the waiting
        front gets the ends."""
        met = [live for live in self._live.values() if asked.means(live.name, live.call)]
        self._cancel([live.number for live in met])
        if met:
            pieces = tuple(Piece(live.number, reason="cancelled") for live in met)
            self._wire.give(Progress(pieces))
        return len({live.name for live in met})

    def _hold(self, *, is_on: bool, at_s: float) -> None:
        """Without a step under way a request that is aborted frees its pages at once."""
        self._holding.hear(is_on=is_on, at_s=at_s)
        if self._holding.is_on:
            self._engine.learn()

    def _trace(self, is_on: bool, front: int) -> None:
        if is_on and self._recorder.is_on:
            self._wire.give(Tracing("a trace is being taken already; stop it first", front))
        elif is_on:
            self._recorder.start()
            self._wire.give(Tracing("", front))
        elif self._recorder.is_on:
            handoff = self.status().handoff
            traced = self._recorder.stop(() if handoff is None else handoff.recent)
            self._wire.give(msgspec.structs.replace(traced, front=front))
        else:
            self._wire.give(Tracing("no trace is being taken; start one first", front))

    def _add(self, message: Add) -> None:
        assert message.number not in self._live, f"number {message.number} is used twice"
        leader = None if message.leader is None else self._live.get(message.leader)
        try:
            request = self._engine.add(
                message.prompt,
                message.sampling,
                priority=message.priority,
                leader=None if leader is None else leader.request,
                salt=message.salt.encode(),
                give=_given(message.handoff),
                take=_taken(message.handoff),
                prior_output=message.prior_output,
            )
        except EssError as error:
            refused = Piece(message.number, reason="refused", sentence=str(error))
            self._wire.give(Progress((refused,)))
            return
        self._live[message.number] = LiveRequest(
            message.number, request, message.name, message.call, self._clock.now_s()
        )
        self._counts.prompt_count += len(request.prompt)

    def _flush(self) -> str:
        if self._live:
            return f"{len(self._live)} requests are running or waiting"
        self._engine.offload.drain()  # a device that has failed ends the engine here
        try:
            self._engine.forget_prefixes()
        except BadState as error:
            return str(error)
        return ""

    # ---- what leaves

    def _step(self) -> None:
        began_s = self._clock.now_s()
        self._recorder.before(self._engine)
        result = self._engine.step()
        self._counts.step_s = self._clock.now_s() - began_s
        self._recorder.after(self._engine, result, began_s)
        self._is_blocked = result.is_empty
        self._counts.turn_count += result.turn_count
        pieces = self._pieces(result)
        if pieces:
            self._wire.give(Progress(tuple(pieces), self._clock.now_s()))

    def _pieces(self, result: StepResult) -> list[Piece]:
        """One piece for each request, also when two steps that it was in were learned at once.
        Requests that wait, of which there may be thousands, have nothing to tell."""
        made_of: dict[int, list[NewTokens]] = {}
        for made in result.made:
            made_of.setdefault(id(made.request), []).append(made)
        scores = zip(result.chunks, result.scored, strict=True)
        scored_of = {id(chunk.request): scored for chunk, scored in scores}
        pieces = []
        for live in list(self._live.values()):
            if live.request.state == "waiting":
                continue
            key = id(live.request)
            piece = self._piece(live, made_of.get(key, []), scored_of.get(key, ()))
            if piece != Piece(live.number):
                pieces.append(piece)
            assert (piece.reason is not None) == (live.request.state == "finished"), piece
            if piece.reason is not None:
                del self._live[live.number]
        return pieces

    def _piece(self, live: LiveRequest, mades: list[NewTokens], scored: Sequence[Chance]) -> Piece:
        tokens = tuple(token for made in mades for token in made.tokens)
        self._counts.made_count += len(tokens)
        return Piece(
            live.number,
            tokens,
            live.request.reason,
            self._admitted(live),
            tuple(chance for made in mades for chance in made.chances),
            self._why(live.request),
            tuple(scored),
            isinstance(live.request.refusal, Unavailable) or bool(live.request.fault),
        )

    def _admitted(self, live: LiveRequest) -> int | None:
        """Tokens found in the prefix cache, once, when the request has left the queue."""
        request = live.request
        is_early = request.state in ("waiting", "loading")
        if live.is_admitted or is_early or request.reason == "refused":
            return None
        live.is_admitted = True
        assert 0 <= request.cached_count <= request.prefill_count, f"request {live.number}"
        count = min(request.cached_count, len(request.prompt))
        self._counts.cached_count += count
        return count

    def _why(self, request: Request) -> str:
        if request.reason == "failed" and request.matcher is not None and not request.fault:
            return request.matcher.failure
        if request.reason != "refused":
            return request.fault
        assert request.refusal is not None, f"request {request.number} was refused without a reason"
        return in_words(request.refusal)

    def _report(self) -> None:
        now_s = self._clock.now_s()
        if now_s - self._told_at_s >= STATUS_EVERY_S:
            self._told_at_s = now_s
            self._wire.give(self.status())

    def status(self) -> Status:
        return status_of(
            self._engine,
            list(self._live.values()),
            self._counts,
            now_s=self._clock.now_s(),
            front_count=self._wire.front_count,
            holding=self._holding,
            handoff=self.peers.status(self._engine.ended_handoffs),
        )


def _given(handoff: Handoff | None) -> int | None:
    return handoff.uid if handoff is not None and handoff.kind == "give" else None


def _taken(handoff: Handoff | None) -> Take | None:
    if handoff is None or handoff.kind == "give":
        return None
    return Take(handoff.uid, handoff.peer, fake=handoff.kind == "fake")


def serve(
    launch: Launch,
    wire: Wire,
    clock: Clock,
    context: zmq.Context[zmq.Socket[bytes]],
    build: Callable[[Launch, Clock], Built] = build,
) -> None:
    """Loads, sends Ready and runs until Stop comes. A failure is sent as Fault before it ends the
    process. What loading refuses is a sentence for the operator: its traceback would hide it."""
    began_s = time.monotonic()
    is_loading = True
    try:
        built = build(launch, clock)
        is_loading = False
        events = events_of(launch.config, context)
        loop = EngineLoop(
            built.engine, wire, clock, port=built.port, peers=built.peers, events=events
        )
        layout = loop.layout
        keep_objects()
        wire.give(
            Ready(
                vocabulary=built.vocabulary,
                length_max=launch.length_max,
                load_s=time.monotonic() - began_s,
                groups=layout.groups,
                row_bytes=layout.row_bytes,
                metadata=loop.peers.metadata,
            )
        )
        loop.run()
        loop.close()
    except Exception as error:
        if is_loading and isinstance(error, EssError):
            wire.give(Fault(str(error)))
            raise SystemExit(1) from error
        wire.give(Fault(f"{type(error).__name__}: {error}"))
        raise


def main(arguments: list[str]) -> int:
    launch = msgspec.json.decode(first_line(), type=Launch)
    try:
        with open_wire(arguments) as (wire, context):
            serve(launch, wire, RealClock(), context)
    finally:
        leave_objects()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
