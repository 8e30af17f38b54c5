"""Streams and documents: waits for the engine, and cancels when the client disconnects.

A dialect (completions, chat, ...) writes the pieces: a `Writer` for streams of events, a function
for one document. This module has the common part: first pieces, keep-alives, stalled readers,
disconnects, failures.

Events leave as encoded bytes, all that are ready in one write. Once a stream is under way they go
straight to the socket in the loop iteration in which they arrive; a task is woken only for the
beginning, the end and a slow reader. No timer runs per event: one timer per stream ticks, and acts
only if nothing was sent since its last tick.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ess.clock import Clock
from ess.engine.process.messages import Piece
from ess.errors import BadInput, EssError, Unavailable
from ess.server.dialects.generation import Delta, Generation
from ess.server.dialects.prompts import Prepared
from ess.server.dialects.schemas import Ask
from ess.server.http.connection.outlets import STRAIGHT, Straight
from ess.server.http.responses import Broken, answer, error_body
from ess.server.process.bounds import JOINED_BYTES_MAX
from ess.server.process.requests.call import Call
from ess.server.process.service import Service
from ess.server.process.tally import Tally

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
CHANCES_MAX: Final = 1000
"""A document with more log probabilities takes the event loop milliseconds: a thread makes it, one
document at a time. Each further thread would take the interpreter from the loop as often."""
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Writer(Protocol):
    """How a dialect writes an answer: `feed` gets every delta of every choice, in order. `done`
    comes last, also behind an error. A writer that `repeats_chances` repeats the log probabilities
    of former deltas. A writer that `ends_long` ends with long events, and makes them one by one."""

    done: bytes = DONE
    repeats_chances: bool = False
    ends_long: bool = False

    def begin(self) -> bytes:
        return b""

    def feed(self, index: int, delta: Delta) -> bytes: ...

    def end(self) -> bytes:
        return b""

    def long_end(self) -> Iterator[bytes]:
        yield self.end()

    def fail(self, error: EssError) -> bytes:
        return event(error_body(error)[1])


class Answer:
    """All choices of one request as they grow."""

    def __init__(self, service: Service, call: Call, generations: Sequence[Generation]) -> None:
        assert len(call.numbers) == len(generations), "one generation per engine request"
        self.service = service
        self.call = call
        self.generations = generations
        self._going_count = len(generations)
        self._times = Times(service.clock, service.tally)

    @property
    def is_done(self) -> bool:
        return self._going_count == 0

    def take(self, piece: Piece) -> tuple[int, Delta]:
        """Turns a piece into text; after a stop string tells the engine to stop too. A failure of
        the engine behind the stop is no part of the answer."""
        index = self.call.numbers.index(piece.number)
        generation = self.generations[index]
        if generation.finish is None:
            self.raise_if_refused(piece)
        delta = generation.feed(piece)
        if delta.tokens:
            self._times.tokens(index, len(delta.tokens), self.call.heard_at_s)
        if delta.finish is not None:
            self._going_count -= 1
            self._times.finished(delta.finish)
            if generation.is_stopped_early:
                self.service.link.abort_one(self.call, piece.number)
        return index, delta

    def raise_if_refused(self, piece: Piece) -> None:
        """Raises what the engine says against the request."""
        if piece.reason not in ("refused", "failed"):
            return
        if piece.is_ours:
            raise (Broken if piece.reason == "failed" else Unavailable)(piece.sentence)
        what = "the grammar" if piece.reason == "failed" else "the engine"
        field = self.generations[self.call.numbers.index(piece.number)].ending.form_field
        of_form = f"{field}: " if piece.sentence.startswith("grammar (") else ""
        raise BadInput(of_form + (piece.sentence or f"{what} refused the request"))

    @property
    def chance_count(self) -> int:
        """Log probabilities of tokens and of the likeliest in their places: a request has equally
        many for each."""
        prompts = [made.prompt_chances for made in self.generations if made.prompt_chances]
        written = len(self.generations) // max(1, len(prompts))  # a prompt's stand in each choice
        kept = [*(made.chances for made in self.generations), *prompts * written]
        return sum(len(chances) * (1 + len(chances[-1].top)) for chances in kept if chances)

    async def collect(self) -> None:
        while not self.is_done:
            for piece in await self.call.take():
                self.take(piece)

    def give_up(self) -> None:
        self.service.link.abort(self.call)


class Times:
    """Records in the server's tally when tokens came: the tokens of a piece share the time since
    the piece before."""

    def __init__(self, clock: Clock, tally: Tally) -> None:
        self._clock = clock
        self._tally = tally
        self._began_s = clock.now_s()
        self._last_s: dict[int, float] = {}

    def tokens(self, index: int, count: int, now_s: float) -> None:
        last_s = self._last_s.get(index)
        if last_s is None:
            self._tally.first_token.add(now_s - self._began_s)
        else:
            self._tally.between_tokens.add((now_s - last_s) / count, count)
        self._last_s[index] = now_s

    def finished(self, how: str) -> None:
        self._tally.finishes[how] += 1
        self._tally.whole.add(self._clock.now_s() - self._began_s)


async def first_of(work: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` until it or any of `others` ends; True if `work` ended first."""
    working, *watching = [asyncio.ensure_future(work_item) for work_item in (work, *others)]
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


async def read(
    request: Request, kind: type[Ask], *, change: Callable[[bytes], bytes] = bytes
) -> Prepared[Ask]:
    """The ask and prompts of the body as `change` makes it, unless it is longer than
    JOINED_BYTES_MAX: then it stays in pieces. A text process reads a long body, for as long as the
    client waits. The raw bytes are dropped, which Starlette would keep as long as the request."""
    service: Service = request.app.state.service
    pieces = [piece async for piece in request.stream()]
    if sum(map(len, pieces)) <= JOINED_BYTES_MAX:
        raw = change(b"".join(pieces))
        if service.texts.is_short(raw, kind):
            return service.texts.read(raw, kind)
        pieces = [raw]
    results: list[Prepared[Ask]] = []

    async def work() -> None:
        results.append(await service.texts.read_apart(pieces, kind))

    if not await first_of(work(), gone(request.receive)):
        raise ClientDisconnect
    return results[0]


async def gone(receive: Receive) -> None:
    """Returns when the client has disconnected; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientGone(Response):
    """Sends nothing: the client has disconnected."""

    def __init__(self) -> None:
        super().__init__(status_code=499)


class EventStream(Response):
    """Server-sent events until every choice has ended; `held` is closed then."""

    def __init__(self, grown: Answer, writer: Writer, first: Sequence[Piece]) -> None:
        super().__init__()
        self._answer = grown
        self._writer = writer
        self._first = first
        self._is_quiet = True
        self._is_sending = False
        self._straight: Straight | None = None
        self._fault: EssError | None = None
        self.held = contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._answer.service
        self._straight = scope.get("extensions", {}).get(STRAIGHT)
        try:
            if not await first_of(self._pump(send), gone(receive), self._tick()):
                service.tally.disconnect_count += 1
        finally:
            self._answer.give_up()
            self.held.close()

    async def _pump(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)}
        await send(head)
        reader = None
        try:
            ready = self._writer.begin() + self._encode(self._first)
            while not self._answer.is_done and self._fault is None:
                if ready:
                    await self._send(send, ready)
                    reader = self._pass_on
                pieces = await self._answer.call.take(reader)
                ready = self._encode(pieces) if pieces else self._nudged()
        except EssError as error:
            ready, self._fault = b"", error
        if self._fault is not None:
            ready += self._writer.fail(self._fault)
        elif self._writer.ends_long:
            ready = await self._send_long_end(send, ready)
        else:
            ready += self._writer.end()
        body = ready + self._writer.done
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_long_end(self, send: Send, ready: bytes) -> bytes:
        """Sends all but the last of the end's events, which it returns. Of streams that end
        together each turn of the event loop makes one event, and other work has turns between. A
        drain waits for an event while it is made, as for a document, not until it is read."""
        service = self._answer.service
        events = self._writer.long_end()
        while True:
            with service.tally.due_documents():
                async with service.long_events:
                    await asyncio.sleep(0)  # the event is made in another turn of the loop
                    event = next(events, None)
            if event is None:
                return ready
            if ready:
                await self._send(send, ready)
            ready = event

    def _nudged(self) -> bytes:
        """A keep-alive, or nothing for a stream whose last bytes went straight to the socket."""
        return b"" if self._answer.is_done else KEEP_ALIVE

    def _pass_on(self, pieces: Sequence[Piece]) -> bool:
        """Writes straight to the socket; for a slow reader the task takes over."""
        straight = self._straight
        if straight is None or not straight.is_free():
            return False
        ready = self._encode(pieces)
        if ready:
            self._is_quiet = False
            straight.write(ready)
        if self._answer.is_done or self._fault is not None:
            self._answer.call.nudge()
        return True

    def _encode(self, pieces: Sequence[Piece]) -> bytes:
        """Pieces as events, up to the piece with which the answer fails, if there is one."""
        grown, writer = self._answer, self._writer
        events = []
        try:
            for piece in pieces:
                events.append(writer.feed(*grown.take(piece)))
        except EssError as error:
            self._fault = error
        return b"".join(events)

    async def _send(self, send: Send, ready: bytes) -> None:
        self._is_quiet, self._is_sending = False, True
        await send({"type": "http.response.body", "body": ready, "more_body": True})
        self._is_sending = False

    async def _tick(self) -> None:
        """Wakes a quiet stream; cancels it when the reader has taken nothing for too long."""
        limits = self._answer.service.limits
        stalled_s = 0.0
        while stalled_s < limits.stall_s:
            await asyncio.sleep(limits.keep_alive_s)
            stalled_s = stalled_s + limits.keep_alive_s if self._is_sending else 0.0
            if self._is_quiet:
                self._answer.call.nudge()
            self._is_quiet = not self._is_sending


def event(document: Any) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


async def respond(
    grown: Answer,
    receive: Receive,
    *,
    writer: Writer | None,
    whole: Callable[[], Any],
    keep: Callable[[Any], Any] = lambda document: document,
) -> Response:
    """A stream if there is a writer, else the document that `whole` makes, if need be in a thread,
    and `keep` completes on the event loop."""
    try:
        if writer is not None:
            for generation in grown.generations:
                generation.keeps_chances = writer.repeats_chances
            return await _stream(grown, receive, writer)
        made: list[Any] = []

        async def work() -> None:
            await grown.collect()
            made.append(await made_of(grown, whole))

        if await first_of(work(), gone(receive)):
            return answer(_with_params(keep(made[0]), grown.call.params))
    except BaseException:
        grown.give_up()
        raise
    return _lost_answer(grown)


async def made_of(grown: Answer, whole: Callable[[], Any]) -> Any:
    """The document of a whole answer."""
    if grown.chance_count <= CHANCES_MAX:
        return whole()
    service = grown.service
    with service.tally.due_documents(len(grown.generations)):
        return await asyncio.get_running_loop().run_in_executor(service.documents, whole)


def _with_params(document: Any, params: Mapping[str, Any] | None) -> Any:
    """The document with the params; several answers of /generate are a list, and each gets them."""
    if params is None:
        return document
    if isinstance(document, list):
        return [_with_params(each, params) for each in document]
    return {**document, "kv_transfer_params": params}


async def _stream(grown: Answer, receive: Receive, writer: Writer) -> Response:
    """Waits for the first pieces, so that a refusal gets its HTTP status."""
    first: list[Piece] = []

    async def wait() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grown.service.limits.keep_alive_s):
                first.extend(await grown.call.take())

    if not await first_of(wait(), gone(receive)):
        return _lost_answer(grown)
    first_of_each = {piece.number: piece for piece in reversed(first)}
    for piece in first_of_each.values():
        grown.raise_if_refused(piece)
    return EventStream(grown, writer, first)


def _lost_answer(grown: Answer) -> Response:
    grown.give_up()
    grown.service.tally.disconnect_count += 1
    return ClientGone()
