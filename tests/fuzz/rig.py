"""The real application under the real protocol class, on connections that are Python objects.

The engine sits in the loop's own thread and answers at the next turn, so that no thread but the
application's own has a say in what happens, and a connection can do what a socket does: hold what
it reads, stop reading what is written, go away at any byte.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ess.engine.process import fake_engine
from ess.engine.process.messages import Add, Packer, Ready, Status
from ess.server.process.service import Limits
from tests.fuzz.fuzzer import Finding
from tests.fuzz.lines import ROOT
from tests.server.harness import EOS, TOKENIZER, VOCABULARY, Served

Result = TypeVar("Result")
STUCK_S = 120.0
LEFT_S = 3.0
KEEP_ALIVE_S = 0.1
PIECE_BYTES = 64 << 10
WRITTEN_HIGH = 64 << 10
HELD_BYTES_MAX = 512 << 10
LIMITS = Limits(running_max=8, waiting_max=24, length_max=1024, tokens_default=24, body_max=1 << 20)
SAYS = (
    "one two three, stop. four",
    'thought</think>text\n\n<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="f">\n'
    '<\uff5cDSML\uff5cparameter name="a" string="true">x</\uff5cDSML\uff5cparameter>\n'
    "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>",
    "\u00e9\u6f22\U0001f642 {}",
)


class InlineEngine(fake_engine.PacedEngine):
    """What it says depends on the prompt's length only."""

    says_ready = True

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.held = threading.Event()
        spoken = [[*TOKENIZER.encode(text), EOS] for text in SAYS]
        super().__init__(lambda add: spoken[len(add.prompt) % len(spoken)], per_step=3)

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    @is_stopped.setter
    def is_stopped(self, is_stopped: bool) -> None:
        if is_stopped:
            self._stopped.set()

    @property
    def going_count(self) -> int:
        return len(self._going)

    def serve(self, endpoint: str) -> None:
        self._stopped.wait()


class InlineWire:
    """Both ends of the wire: the link's socket, and what the engine gives to."""

    front_count = 1

    def __init__(self, engine: InlineEngine) -> None:
        self._engine = engine
        self._packer = Packer()
        self._heard: asyncio.Queue[bytes] = asyncio.Queue()
        self._has_turn = False
        self.give(Ready(vocabulary=VOCABULARY, length_max=LIMITS.length_max, load_s=0.0))
        self.give(Status())

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def bind(self, endpoint: str) -> None:
        pass

    def close(self, *, linger: int | None = None) -> None:
        pass

    def send(self, raw: bytes, flags: int = 0) -> asyncio.Future[None]:
        self._engine.obey(self._packer.for_engine(raw), self)
        self._ask_for_turn()
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent.set_result(None)
        return sent

    async def recv(self) -> bytes:
        return await self._heard.get()

    def take(self, *, timeout_s: float) -> list[Add]:
        return []

    def give(self, message: Any) -> None:
        self._heard.put_nowait(self._packer.pack(message))

    def _ask_for_turn(self) -> None:
        if self._engine.going_count and not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._has_turn = False
        self._engine.turn(self)
        self._ask_for_turn()


class InlineContext:
    def __init__(self, engine: InlineEngine) -> None:
        self._engine = engine

    def socket(self, kind: int) -> InlineWire:
        return InlineWire(self._engine)

    def destroy(self, *, linger: int) -> None:
        pass


class Errors(logging.Handler):
    """What was logged as an error since it was last asked."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._records: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        kind, place = described(error) if error is not None else ("log", record.name)
        self._records.append((kind, place, f"{record.getMessage()} {error!r}"))

    def note(self, error: BaseException, sentence: str) -> None:
        self._records.append((*described(error), f"{sentence}: {error!r}"))

    def take(self) -> list[tuple[str, str, str]]:
        taken, self._records = self._records, []
        return taken


def described(error: BaseException) -> tuple[str, str]:
    """The exception's type, and the last place in the package, or at all, that it went through."""
    ours, last, trace = "", "nowhere", error.__traceback__
    while trace is not None:
        code, root = trace.tb_frame.f_code, f"{ROOT / 'ess'}/"
        if code.co_filename.startswith(root):
            ours = f"ess/{code.co_filename.removeprefix(root)}:{code.co_name}"
        last = f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}"
        trace = trace.tb_next
    return type(error).__name__, ours or last


class Connection(asyncio.Transport):
    """A socket's side of asyncio, without a socket. `written` is all that was answered; with
    `is_closed_by_input` the server closed the connection while it read what the client sent."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Any, errors: Errors) -> None:
        super().__init__({"peername": ("127.0.0.1", 5000), "sockname": ("127.0.0.1", 80)})
        self.written = bytearray()
        self.is_cut = self.is_closed_by_input = False
        self._loop = loop
        self._protocol = protocol
        self._errors = errors
        self._unread: list[bytes] = []
        self._is_reading, self._is_in_protocol = True, False
        self._is_closing = self._is_lost = self._has_ended = False
        self._is_stalled, self._waiting_bytes, self._is_paused = False, 0, False

    # ---- the client's side

    def feed(self, raw: bytes) -> None:
        for start in range(0, len(raw), PIECE_BYTES):
            self._unread.append(raw[start : start + PIECE_BYTES])
        self._pump()

    def stall(self, *, is_stalled: bool) -> None:
        """The client stops reading, or reads again."""
        self._is_stalled = is_stalled
        if is_stalled:
            return
        self._waiting_bytes = 0
        if self._is_paused and not self._is_lost:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing:
            self._loop.call_soon(self._lose, None)

    def leave(self, *, is_reset: bool) -> None:
        self.is_cut = self.is_cut or not (self._is_closing or self._has_ended)
        self._is_closing = True
        self._lose(ConnectionResetError("reset by the fuzzer") if is_reset else None)

    # ---- what asyncio has

    def write(self, raw: Any) -> None:
        if self._has_ended:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._is_lost or self._is_closing:
            return
        self.written += raw
        if self._is_stalled:
            self._waiting_bytes += len(raw)
            if self._waiting_bytes > WRITTEN_HIGH and not self._is_paused:
                self._is_paused = True
                self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._has_ended = True

    @property
    def is_over(self) -> bool:
        """Nothing more will be answered."""
        return self._is_closing or self._has_ended

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._loop.call_soon(self._pump)

    def get_write_buffer_size(self) -> int:
        return self._waiting_bytes

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing, self.is_closed_by_input = True, self._is_in_protocol
            if not self._is_stalled:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self.is_cut = self._is_closing = True
        self._loop.call_soon(self._lose, None)

    def _pump(self) -> None:
        while self._unread and self._is_reading and not self._is_closing:
            self._is_in_protocol = True
            try:
                self._protocol.data_received(self._unread.pop(0))
            except Exception as error:
                self._errors.note(error, "data_received raised")
                self.abort()
            finally:
                self._is_in_protocol = False

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._unread.clear()
            self._protocol.connection_lost(error)


class Rig(Served):
    """A served application, and the judge of what is left behind in it."""

    def __init__(self, **given: Any) -> None:
        engine = InlineEngine()
        super().__init__(
            engine,  # type: ignore[arg-type]
            limits=LIMITS,
            context_of=lambda: InlineContext(engine),  # type: ignore[arg-type, return-value]
            head_bytes_max=4096,
            connections_max=4,
            **given,
        )
        self.errors = Errors()
        self.inline = engine

    def __enter__(self) -> Rig:
        logging.getLogger().addHandler(self.errors)
        super().__enter__()
        self._server.config.timeout_keep_alive = KEEP_ALIVE_S  # type: ignore[assignment]
        self._loop.set_exception_handler(self._on_loop_error)
        self._tasks_before = self.run(_task_count)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        logging.getLogger().removeHandler(self.errors)

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """In the server's thread."""
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result(STUCK_S)
        except TimeoutError:
            raise Finding("stuck", "loop", f"nothing happened for {STUCK_S:g} s") from None

    def connect(self) -> tuple[Connection, Any]:
        protocol = self._protocol(self._server.config, self._server.server_state, {}, self._loop)
        made = Connection(self._loop, protocol, self.errors)
        protocol.connection_made(made)
        return made, protocol

    async def drained(self) -> None:
        """When no client is connected nothing may remain: no task, no call, nothing in the
        engine."""
        deadline_s = time.monotonic() + LEFT_S
        while left := "; ".join(self._left()):
            if time.monotonic() > deadline_s:
                raise Finding("left", left.split(" ")[0], left)
            await asyncio.sleep(0 if time.monotonic() < deadline_s - LEFT_S + 0.01 else 0.001)

    def _left(self) -> Iterator[str]:
        service, state = self.service, self._server.server_state
        counts = {
            "tasks": len(state.tasks),
            "connections": len(state.connections),
            "calls": service.link.open_count,
            "requests": self.inline.going_count,
            "counted-connections": service.tally.connection_count,
            "other-tasks": len(asyncio.all_tasks()) - 1 - self._tasks_before,
        }
        return (f"{name} {count}" for name, count in counts.items() if count)

    def census(self) -> Counter[str]:
        """Live objects of the packages that hold requests, without the board's last minute: it
        grows with time, not with requests."""
        gc.collect()
        recent = Counter(type(status) for _, status in self.service.board.recent)
        roots = ("ess", "uvicorn", "starlette", "fastapi", "httptools")
        kinds = Counter(type(thing) for thing in gc.get_objects()) - recent
        return Counter(
            {
                f"{kind.__module__}.{kind.__qualname__}": count
                for kind, count in kinds.items()
                if str(kind.__module__).partition(".")[0] in roots
            }
        )

    def check_errors(self) -> None:
        for kind, place, sentence in self.errors.take():
            raise Finding(kind, place, sentence)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        self.errors.note(error, str(context["message"]))


async def _task_count() -> int:
    return len(asyncio.all_tasks()) - 1
