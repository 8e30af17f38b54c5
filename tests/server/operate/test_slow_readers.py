"""Pieces of answers that wait for slow clients: how much may wait, and whose answer ends beyond."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ess.clock import Clock
from ess.engine.process.messages import Abort, Packer, Piece, Progress
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.sampling import Sampling
from ess.server.commands.start.files.checkpoint import read_checkpoint
from ess.server.commands.start.files.words import read_words
from ess.server.commands.start.server_facts import ServerFacts, make_service
from ess.server.commands.start.settings import resolve
from ess.server.commands.start.sizing import plan_memory
from ess.server.dialects.generation import Generation
from ess.server.dialects.routes.openai_responses import ResponseWriter
from ess.server.dialects.streaming import EventStream
from ess.server.http.connection.reader_watch import LOOK_S, ReaderWatch
from ess.server.http.responses import Refused
from ess.server.process.board import Board
from ess.server.process.link import EngineLink
from ess.server.process.requests.call import TAKEN_MAX, Call, bytes_of
from ess.server.process.requests.kept_responses import KeptResponses
from ess.server.process.tally import Tally
from tests.attacks.wire import completion, head, post, rest
from tests.server.harness import PacedEngine, Served, counting, until
from tests.server.test_link import READY, Peer, linked, told
from tests.support.manual_clock import ManualClock

ONE = Piece(0, (7,))


def test_the_call_furthest_behind_ends_and_the_others_go_on(tmp_path: Path):
    async def act(link: EngineLink, peer: Peer) -> None:
        hearing = asyncio.ensure_future(link.run())
        link.calls.unread_max = 9 * bytes_of(ONE)
        await peer.send(Packer().pack(READY))
        await link.engine.became_ready.wait()
        slow = link.start("slow", [([1], Sampling()), ([2], Sampling())])
        slower, fast = (link.start(name, [([3], Sampling())]) for name in ("slower", "fast"))
        assert [(await told(peer)).number for _ in range(4)] == [0, 1, 2, 3]

        async def say(*pieces: Piece) -> None:
            """Until the fast client has its token, and so until all is bounded."""
            await peer.send(Packer().pack(Progress((*pieces, Piece(3, (9,))))))
            assert [piece.tokens for piece in await fast.take()] == [(9,)]

        for _ in range(3):
            await say(Piece(0, (7,)), Piece(1, (7,)), Piece(2, (8,)))
        assert not link.calls.refusals, "as much as may wait"
        await say(Piece(0, (7,)), Piece(1, (7,)), Piece(2, (8,)))
        assert [await told(peer), await told(peer)] == [Abort(0), Abort(1)]
        with pytest.raises(Refused, match=rf"wait in the server.* {link.calls.unread_max:,} may"):
            await slow.take()
        assert (slow.unread_bytes, slow.pending, link.open_count) == (0, set(), 2)
        await say(Piece(0, (7,)))
        assert [piece.tokens for piece in await slower.take()] == [(8,)] * 4

        await say(*[Piece(2, (8,))] * 20, Piece(2, (8,), "length"))
        with pytest.raises(Refused, match="too slowly") as refusal:
            await slower.take()
        assert (refusal.value.reason, link.calls.refusals) == ("slow_reader", {"slow_reader": 2})
        assert link.open_count == 1, "it had ended in the engine"
        await say()
        hearing.cancel()

    linked(tmp_path, act)


def test_what_waits_is_taken_in_order_a_little_at_a_time():
    async def run() -> None:
        call = Call("a", range(1), started_s=0.0)
        for token in range(2 * TAKEN_MAX + 1):
            call.put(Piece(0, (token,)))
        seen: list[int] = []
        while call.unread_bytes:
            assert call.unread_bytes == (2 * TAKEN_MAX + 1 - len(seen)) * bytes_of(ONE)
            taken = await call.take()
            assert len(taken) <= TAKEN_MAX
            seen += [token for piece in taken for token in piece.tokens]
        assert seen == [*range(2 * TAKEN_MAX + 1)]

    asyncio.run(run())


@pytest.mark.parametrize("top_count", [None, 0, 5, 20])
def test_a_piece_takes_as_much_memory_as_is_counted(top_count: int | None):
    def chance(seed: int) -> Chance:
        top = tuple((1000 + seed + rank, -0.1 * seed - rank) for rank in range(top_count or 0))
        return Chance(-0.5 - seed, 300 + seed, top)

    pieces = [
        Piece(1000 + n, (5000 + n,), chances=() if top_count is None else (chance(n),))
        for n in range(500)
    ]
    raw = msgspec.msgpack.encode(pieces)
    gc.collect()  # tuples that were kept for reuse would not be seen
    tracemalloc.start()
    try:
        made = msgspec.msgpack.decode(raw, type=list[Piece])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made == pieces
    assert 0.7 <= sum(map(bytes_of, made)) / taken <= 1.5


def test_who_reads_nothing_of_a_long_stream_gets_an_error_and_the_others_their_tokens():
    """The answer does not fit into the sockets, and the client is not stalled for long enough."""
    engine = PacedEngine(counting(3000))
    with Served(engine, send_bytes=4096) as served, socket.socket() as made:
        calls, tally = served.service.link.calls, served.service.tally
        calls.unread_max = 20_000
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.settimeout(60)
        made.connect(("127.0.0.1", served.port))
        made.sendall(post(completion(max_tokens=3000, stream=True), "connection: close"))
        until(lambda: tally.refusals["slow_reader"] == 1, "the end of the slow one")
        until(lambda: engine.aborted == [engine.adds[0].number], "the abort")
        assert served.service.link.open_count == 0
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as other:
            other.sendall(post(completion(max_tokens=50, stream=True), "connection: close"))
            whole = rest(other)
        assert whole.count(b'"text":"a"') == 50
        told = rest(made)
        assert 0 < told.count(b'"text":"a"') < 3000
        *_, error, done = [part for part in told.split(b"\n\n") if b"data: " in part]
        said = json.loads(error[error.index(b"data: ") + 6 :])["error"]
        assert (said["type"], said["code"]) == ("overloaded", "slow_reader")
        assert "20,000 may wait" in said["message"]
        assert b"[DONE]" in done


def test_a_response_whose_reader_stops_in_the_last_events_is_not_open_any_more(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else a drain would wait for it until its limit, and new requests would find less room. It is
    kept, though its reader may leave."""
    written, made = ResponseWriter._written, []

    def noted(writer: ResponseWriter, event: dict[str, Any]) -> bytes:
        made.append(event["type"])
        return written(writer, event)

    monkeypatch.setattr(ResponseWriter, "_written", noted)
    asked = {"input": "x", "stream": True, "max_output_tokens": 200, "top_logprobs": 20}
    body = json.dumps(asked).encode()
    lines = (f"content-length: {len(body)}", "connection: close")
    engine, kept = PacedEngine(counting(200)), KeptResponses(1 << 20)
    with Served(engine, kept=kept, send_bytes=4096) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", served.port))
        client.sendall(head("/v1/responses", *lines, method="POST") + body)
        told = b""
        while b"response.output_text.done" not in told:
            told += client.recv(4096)
        until(lambda: "response.output_item.done" in made, "the event behind what is unread")
        until(lambda: served.service.unanswered_count == 0, "an end that no drain waits for")
        assert made[-1] == "response.output_item.done", "the last event waits for the reader"
        identity = re.search(rb'"id":"(resp_[^"]+)"', told)[1].decode()
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as other:
            other.sendall(head(f"/v1/responses/{identity}", "connection: close"))
            assert b'"status":"incomplete"' in rest(other)
        told += rest(client)
    assert made[-1] == "response.incomplete"
    assert b"event: response.incomplete" in told
    assert told.endswith(b"\r\n0\r\n\r\n")


class Hurried(Clock):
    """A minute passes between two looks."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 60
        return self._now_s


def test_a_server_that_ends_lets_go_of_readers_that_stopped():
    """uvicorn would cancel their streams, with a traceback for each. Other clients stay."""
    engine = PacedEngine(counting(3000))
    with Served(engine, send_bytes=4096) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", served.port))
        client.sendall(post(completion(max_tokens=3000, stream=True), "connection: close"))
        until(lambda: served.is_held_back, "a stream whose client reads nothing")
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as other:
            until(lambda: len(served.connections) == 2, "a connection that owes nothing")
            served.let_out(Hurried())
            until(lambda: len(served.connections) == 1 and not served.task_count, "one end")
            other.sendall(head("/health", "connection: close"))
            assert b" 200 OK" in rest(other)


GENERATE = {
    "text": "x",
    "stream": True,
    "return_logprob": True,
    "sampling_params": {"max_new_tokens": 9},
}


@pytest.mark.parametrize(
    ("path", "body", "kept_count"),
    [
        ("/v1/completions", completion(max_tokens=9, stream=True, logprobs=2), 0),
        ("/generate", json.dumps(GENERATE).encode(), 9),
    ],
)
def test_a_stream_keeps_log_probabilities_only_to_send_them_again(
    path: str, body: bytes, kept_count: int, monkeypatch: pytest.MonkeyPatch
):
    generations: list[Generation] = []
    init = EventStream.__init__

    def noted(self: EventStream, *given: object) -> None:
        init(self, *given)
        generations.extend(self._answer.generations)

    monkeypatch.setattr(EventStream, "__init__", noted)
    with Served(PacedEngine(counting(9))) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=60) as made:
            lines = (f"content-length: {len(body)}", "connection: close")
            made.sendall(head(path, *lines, method="POST") + body)
            told = rest(made)
        [generation] = generations
    assert told.count(b"logprobs") >= 9
    assert (generation.made_count, len(generation.chances)) == (9, kept_count)


def test_how_much_may_wait_is_set(tmp_path: Path):
    """And the service of every process knows it."""
    resolved, checkpoint = resolve({"unread_bytes": "3MiB"}, environment={}), read_checkpoint("")
    settings, layout = resolved.settings, checkpoint.config.layout()
    plan = plan_memory(settings, layout, positions_max=2048, weight_bytes=1, free=8 << 30)
    told = ServerFacts(resolved=resolved, checkpoint=checkpoint, plan=plan)

    async def act(link: EngineLink, peer: Peer) -> None:
        make_service(told, read_words(settings, checkpoint), link=link, board=Board(ManualClock()))
        assert link.calls.unread_max == 3 << 20

    linked(tmp_path, act)


class Socket:
    """A connection for which `unsent` bytes wait, and the loop that looks at it."""

    def __init__(self, unsent: int, slow: set[ReaderWatch]) -> None:
        self.unsent, self.tally, self.is_cut = unsent, Tally(), False
        transport = SimpleNamespace(get_write_buffer_size=lambda: self.unsent, abort=self._abort)
        loop = SimpleNamespace(call_later=self._call_later)
        shared = {"tally": self.tally, "slow": slow, "unsent_max": 100}
        self.watch = ReaderWatch(transport, loop, stall_s=6 * LOOK_S, **shared)
        self.watch.begin()

    def _abort(self) -> None:
        self.is_cut = True

    def _call_later(self, after_s: float, call: Callable[..., None], *given: object) -> Any:
        assert after_s == LOOK_S
        self.look = lambda: call(*given)
        return SimpleNamespace(cancel=lambda: None)


def test_of_sockets_in_which_too_much_waits_the_fullest_is_closed():
    slow: set[ReaderWatch] = set()
    first, second, third = (Socket(unsent, slow) for unsent in (60, 70, 30))
    for socket_, is_cut in ((first, False), (third, False), (second, True)):
        socket_.look()
        assert socket_.is_cut == is_cut, socket_.unsent
    assert second.tally.refusals["slow_reader"] == 1
    first.unsent = 1000
    third.watch.end()
    first.look()  # alone it may take its time, as long as it takes something
    for taken in (0, 0, 0, 1, 0, 0, 0, 0, 0):
        first.unsent -= taken
        first.look()
    assert not first.is_cut
    first.look()
    assert (first.is_cut, slow) == (True, set())


def test_a_socket_that_has_just_begun_spares_none_of_the_others():
    """Else new answers, each longer than the last, would keep all earlier ones."""
    slow: set[ReaderWatch] = set()
    *before, last = [Socket(30 + more, slow) for more in range(20)]
    for socket_ in before:
        socket_.look()
        assert sum(watch.unsent for watch in slow) <= 100
    assert [socket_.unsent for socket_ in before if not socket_.is_cut] == [30, 31, 32]
    assert not last.is_cut
