"""A real HTTP server on a real socket, over an engine that says what a test wants it to say.

The engine here has no model: it speaks the engine's side of the wire at a pace that the test sets.
What a real engine says is tested over real processes in test_life.py and test_embedded.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
import uvloop
import zmq
import zmq.asyncio

from ess.clock import RealClock
from ess.engine.messages import Abort, Add, Chance, Flush, Flushed, Piece, Progress, Ready, Status
from ess.engine.wire import SocketWire
from ess.models.chat.styles import ChatStyle, PlainStyle
from ess.models.tokenizer import Tokenizer
from ess.server.app import make_app
from ess.server.board import Board
from ess.server.launch import embedded_path
from ess.server.link import EngineLink
from ess.server.protocol import limited
from ess.server.running import QuietServer
from ess.server.service import Limits, SamplingDefaults, Service

VOCABULARY = 4096
EOS = 1
DEADLINE_S = 10.0

Script = Callable[[Add], Sequence[int]]


def until(true: Callable[[], bool], what: str = "it") -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.005)


@dataclass(eq=False)
class Going:
    add: Add
    left: deque[int]
    told: bool = False
    made: int = 0


@dataclass(eq=False)
class PacedEngine:
    """Gives every request the next token of its script, all in one message, `pace_s` apart.

    A script that runs out ends the request with `stop` if its last token is one of the stop ids.
    """

    script: Script
    pace_s: float = 0.0
    per_step: int = 1
    cached_count: int = 0
    says_ready: bool = True
    status: Status = field(default_factory=Status)
    adds: list[Add] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    flushes: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    refuse: str = ""
    _ended: threading.Event = field(default_factory=threading.Event)
    _going: dict[int, Going] = field(default_factory=dict)

    def run(self, endpoint: str) -> None:
        context = zmq.Context()
        wire = SocketWire(context, endpoint)
        if self.says_ready:
            wire.give(Ready(vocabulary=VOCABULARY, length_max=4096, load_s=0.0))
        self.held.set()
        told_at_s = 0.0
        while not self._ended.is_set():
            for message in wire.take(timeout_s=0.0 if self._going else 0.01):
                self._obey(message, wire)
            if not self.held.wait(0.01):
                continue
            if self._going:
                wire.give(Progress(tuple(self._pieces())))
                time.sleep(self.pace_s)
            if time.monotonic() - told_at_s > 0.05:
                told_at_s = time.monotonic()
                wire.give(self.status)
        wire.close()
        context.term()

    def _obey(self, message: object, wire: SocketWire) -> None:
        match message:
            case Add():
                self.adds.append(message)
                if self.refuse:
                    refused = Piece(message.number, reason="refused", sentence=self.refuse)
                    wire.give(Progress((refused,)))
                    return
                self._going[message.number] = Going(message, deque(self.script(message)))
            case Abort(number):
                self.aborted.append(number)
                self._going.pop(number, None)
            case Flush():
                self.flushes += 1
                wire.give(Flushed("" if not self._going else "busy"))

    def _pieces(self) -> Iterator[Piece]:
        for number, going in list(self._going.items()):
            sampling = going.add.sampling
            tokens, reason = [], None
            while going.left and len(tokens) < self.per_step and reason is None:
                tokens.append(going.left.popleft())
                going.made += 1
                if tokens[-1] in sampling.stop_ids and going.made >= sampling.tokens_min:
                    reason = "stop"
                elif going.made >= sampling.tokens_max or not going.left:
                    reason = "length"
            chances = ()
            if sampling.logprobs is not None:
                chances = tuple(chance(token, sampling.logprobs) for token in tokens)
            cached = None if going.told else self.cached_count
            going.told = True
            if reason is not None:
                del self._going[number]
            yield Piece(number, tuple(tokens), reason, cached, chances)

    def stop(self) -> None:
        self._ended.set()


def chance(token: int, count: int) -> Chance:
    top = tuple((token + i, -0.5 - i) for i in range(count))
    return Chance(-0.5, 1, top)


class Served:
    """A server in a thread of this process. `url` has no path; `service` is for looking only."""

    def __init__(
        self,
        engine: PacedEngine,
        *,
        limits: Limits | None = None,
        style: ChatStyle | None = None,
        is_marked: bool = False,
        keys: Sequence[str] = (),
        connections_max: int = 1024,
        head_bytes_max: int = 32 << 10,
    ) -> None:
        self.engine = engine
        self._keys = keys
        self._limits = limits or Limits(running_max=16, waiting_max=64, length_max=4096)
        self._style = style or PlainStyle()
        self._is_marked = is_marked
        self._protocol = limited(connections_max=connections_max, head_bytes_max=head_bytes_max)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        self.service: Service

    def __enter__(self) -> Served:
        self._folder = tempfile.TemporaryDirectory()
        endpoint = f"ipc://{self._folder.name}/engine"
        self._thread = threading.Thread(target=self._run, args=(endpoint,))
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        self._engine_thread = threading.Thread(target=self.engine.run, args=(endpoint,))
        self._engine_thread.start()
        if self.engine.says_ready:
            until(lambda: self.service.link.state == "ready", "the engine")
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.held.set()
        self.engine.stop()
        self._engine_thread.join(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(DEADLINE_S)
        self._folder.cleanup()
        assert not self._thread.is_alive()
        assert not self._engine_thread.is_alive()

    def _end(self) -> None:
        self.service.link.lose("the test is over")
        self._server.should_exit = True

    def call(self, act: Callable[[], object]) -> None:
        """In the server's thread."""
        self._loop.call_soon_threadsafe(act)

    def _run(self, endpoint: str) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(endpoint))

    async def _serve(self, endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        context = zmq.asyncio.Context()
        clock = RealClock()
        board = Board(clock)
        link = EngineLink(context, endpoint, board=board, clock=clock)
        self.service = service = Service(
            names=("test-model",),
            model_type="deepseek_v32",
            architecture="Test",
            tokenizer=TOKENIZER,
            style=self._style,
            is_marked=self._is_marked,
            eos_ids=(EOS,),
            vocabulary=VOCABULARY,
            token_capacity=65536,
            limits=self._limits,
            defaults=SamplingDefaults(),
            link=link,
            board=board,
            clock=clock,
        )
        config = uvicorn.Config(
            make_app(service, keys=self._keys),
            http=self._protocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        self._server = QuietServer(config)
        hearing = asyncio.ensure_future(link.run())
        self._up.set()
        await self._server.serve(sockets=[self._listener])
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        link.close()
        context.destroy(linger=0)


TOKENIZER = Tokenizer(embedded_path())


def saying(text: str, *, ends: bool = True) -> Script:
    """The same text for everybody, then the end token."""
    ids = TOKENIZER.encode(text)
    return lambda add: [*ids, *([EOS] if ends else [])]


def counting(count: int) -> Script:
    """`count` times the token for one letter."""
    [letter] = TOKENIZER.encode("a")
    return lambda add: [letter] * count


@contextlib.contextmanager
def raw(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as made:
        yield made
