"""A real HTTP server on a real socket, over an engine that says what a test wants it to say.

The engine here has no model: it speaks the engine's side of the wire at a pace that the test sets.
What a real engine says is tested over real processes in test_life.py and test_embedded.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn
import uvloop
import zmq
import zmq.asyncio
from starlette.types import ASGIApp

from ess.clock import Clock, RealClock
from ess.engine.process import fake_engine
from ess.engine.process.messages import Abort, Add, Flush, Piece, Progress, Ready, Status, ToEngine
from ess.engine.process.wire import SocketWire
from ess.models.chat.styles import ChatStyle, DeepSeekStyle, PlainStyle
from ess.models.text.tokenizer import Tokenizer
from ess.server.commands.start.files.checkpoint import embedded_path
from ess.server.http.app import create_app
from ess.server.http.connection.protocol import LimitedProtocol, limited
from ess.server.process.board import Board
from ess.server.process.lifecycle import QuietServer, keep_meeting, let_out
from ess.server.process.link import EngineLink
from ess.server.process.pair.peers import WHOLE, Split
from ess.server.process.requests.kept_responses import KeptResponses
from ess.server.process.service import Limits, SamplingDefaults, Service
from ess.server.process.tally import Tally
from ess.server.process.text_child import Desk
from ess.server.process.texts import PROGRAM, Texts
from ess.transfer.endpoint import Identity

if TYPE_CHECKING:
    import openai
    from opentelemetry.sdk.trace import TracerProvider

VOCABULARY = 4096
EOS = 1
DEADLINE_S = 120.0
STYLES = (DeepSeekStyle, PlainStyle)
STYLED = "tests.support.styled_text_child"
"""A text process chooses the style by the folder, here always that of the model in the box."""


def until(true: Callable[[], bool], what: str = "it", *, within_s: float = DEADLINE_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"{what} did not come true"
        time.sleep(0.005)


class PacedEngine(fake_engine.PacedEngine):
    """Records requests, can be held, and refuses every request if the test says so; by a refusal of
    a grammar only those with a grammar. It loads until `says_ready` is set."""

    def __init__(
        self,
        script: fake_engine.Script,
        *,
        says_ready: bool = True,
        status: Status | None = None,
        refuse: str = "",
        **given: object,
    ) -> None:
        super().__init__(script, **given)
        self.says_ready = says_ready
        self.refuse = refuse
        self.adds: list[Add] = []
        self.aborted: list[int] = []
        self.flushes = 0
        identity = given.get("identity")
        self.metadata = identity.hello() if isinstance(identity, Identity) else b""
        self.held = threading.Event()
        self.held.set()
        self._rests = threading.Event()
        self._shown = status

    def hold(self) -> None:
        """From now on it takes requests and says nothing; a turn under way ends first."""
        self._rests.clear()
        self.held.clear()
        assert self._rests.wait(DEADLINE_S), "its turn does not end"

    def serve(self, endpoint: str) -> None:
        context = zmq.Context()
        wire = SocketWire(context, [endpoint])
        ready = Ready(vocabulary=VOCABULARY, length_max=4096, load_s=0.0, metadata=self.metadata)
        is_told = False
        while not self.is_stopped:
            if self.says_ready and not is_told:
                wire.give(ready)
                is_told = True
            if self.held.is_set():
                self.turn(wire)
            else:
                self._rests.set()
                for message in wire.take(timeout_s=0.01):
                    self.obey(message, wire)
        wire.close()
        context.term()

    def obey(self, message: ToEngine, wire: SocketWire) -> None:
        match message:
            case Add():
                self.adds.append(message)
                is_free = message.sampling.grammar is None
                if self.refuse and not (is_free and self.refuse.startswith("grammar (")):
                    refused = Piece(message.number, reason="refused", sentence=self.refuse)
                    wire.give(Progress((refused,)))
                    return
            case Abort(number):
                self.aborted.append(number)
            case Flush():
                self.flushes += 1
        super().obey(message, wire)

    def status(self) -> Status:
        return self._shown or super().status()


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
        origins: Sequence[str] = (),
        kept: KeptResponses | None = None,
        connections_max: int = 1024,
        head_bytes_max: int = 32 << 10,
        idle_s: int = 5,
        send_bytes: int = 0,
        spans: TracerProvider | None = None,
        root_path: str = "",
        within: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        context_of: Callable[[], zmq.asyncio.Context] = zmq.asyncio.Context,
        read_s: float = 60.0,
        split_of: Callable[[EngineLink], Split] = lambda link: WHOLE,
    ) -> None:
        self._read_s = read_s
        self._split_of = split_of
        self.engine = engine
        self._root_path = root_path
        self._within = within
        self._context_of = context_of
        self._keys = keys
        self._origins = origins
        self._kept = kept
        self._idle_s = idle_s
        self._spans = spans
        self._limits = limits or Limits(running_max=16, waiting_max=64, length_max=4096)
        self._style = style or PlainStyle()
        self._is_marked = is_marked
        self._tally = Tally()
        self._protocol = limited(
            connections_max=connections_max,
            head_bytes_max=head_bytes_max,
            stall_s=self._limits.stall_s,
            tally=self._tally,
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        if send_bytes:  # connections take this over, and wait in the server instead
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        self._clients = contextlib.ExitStack()
        self.service: Service

    def client(self) -> openai.OpenAI:
        """It is closed at the end: the collector of garbage could come to its socket before it."""
        import openai

        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self._clients.enter_context(made)

    def __enter__(self) -> Served:
        self._folder = tempfile.TemporaryDirectory()
        endpoint = f"ipc://{self._folder.name}/engine"
        self._thread = threading.Thread(target=self._run, args=(endpoint,))
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        self._engine_thread = threading.Thread(target=self.engine.serve, args=(endpoint,))
        self._engine_thread.start()
        if self.engine.says_ready:
            until(lambda: self.service.link.engine.state == "ready", "the engine")
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.held.set()
        self.engine.is_stopped = True
        self._engine_thread.join(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(DEADLINE_S)
        self._folder.cleanup()
        self._clients.close()
        assert not self._thread.is_alive()
        assert not self._engine_thread.is_alive()

    def _end(self) -> None:
        self.service.link.lose("the test is over")
        self._server.should_exit = True

    @property
    def thread(self) -> threading.Thread:
        """Where the server's event loop runs."""
        return self._thread

    def call(self, act: Callable[[], object]) -> None:
        """In the server's thread."""
        self._loop.call_soon_threadsafe(act)

    def let_out(self, clock: Clock) -> None:
        asyncio.run_coroutine_threadsafe(let_out(self._server, clock), self._loop).result(
            DEADLINE_S
        )

    @property
    def task_count(self) -> int:
        """Of requests that are being answered."""
        return len(self._server.server_state.tasks)

    @property
    def is_held_back(self) -> bool:
        """A reader is behind."""
        return any(each.flow.write_paused for each in self.connections)

    @property
    def connections(self) -> list[LimitedProtocol]:
        return list(self._server.server_state.connections)

    def _run(self, endpoint: str) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve(endpoint))

    async def _serve(self, endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        context = self._context_of()
        clock = RealClock()
        board = Board(clock)
        link = EngineLink(context, endpoint, board=board, clock=clock)
        desk = Desk(
            model=str(embedded_path()), length_max=self._limits.length_max, vocabulary=VOCABULARY
        )
        is_known = type(self._style) in STYLES
        program = (STYLED, type(self._style).__name__) if is_known else PROGRAM
        texts = Texts(TOKENIZER, self._style, desk, read_s=self._read_s, program=program)
        self.service = service = Service(
            names=("test-model",),
            model_type="deepseek_v32",
            architecture="Test",
            tokenizer=TOKENIZER,
            texts=texts,
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
            tally=self._tally,
            split=self._split_of(link),
            kept=self._kept,
        )
        app = create_app(
            service,
            keys=self._keys,
            spans=self._spans,
            root_path=self._root_path,
            origins=self._origins,
        )
        config = uvicorn.Config(
            self._within(app),
            http=self._protocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            timeout_keep_alive=self._idle_s,
            timeout_graceful_shutdown=1,
        )
        self._server = QuietServer(config)
        hearing = asyncio.gather(link.run(), keep_meeting(service))
        self._up.set()
        await self._server.serve(sockets=[self._listener])
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await texts.stop()
        link.close()
        context.destroy(linger=0)


TOKENIZER = Tokenizer(embedded_path())


def saying(text: str, *, ends: bool = True) -> fake_engine.Script:
    """The same text for everybody, then the end token."""
    ids = TOKENIZER.encode(text)
    return lambda add: [*ids, *([EOS] if ends else [])]


def counting(count: int) -> fake_engine.Script:
    """`count` times the token for one letter."""
    [letter] = TOKENIZER.encode("a")
    return lambda add: itertools.repeat(letter, count)


@contextlib.contextmanager
def raw(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as made:
        yield made
