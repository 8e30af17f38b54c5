"""Reads and encodes bodies where that cannot hold up the event loop.

Decoding, templates and the tokenizer hold the interpreter lock while they run, even in a thread,
and for a body of 32 MiB that can take a minute. So only short bodies are read here, on the loop.
The others go, as raw bytes, to a text process (`text_child`), which returns ids and the rest of the
ask: both are bounded, so that taking them over is quick as well.

There are three such processes: for bodies of up to LOOP_BODY_BYTES (with a template), of up to
SHORT_BODY_BYTES, and beyond, so that a short body does not wait behind a long one. In each, bodies
take turns. A process that takes too long is killed with its work, as is one whose client has left,
after a moment. If a process dies it is replaced, and its work tried again once.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Final

import msgspec

from ess.engine.process.lifeline import words_of
from ess.errors import BadInput, EssError, Unavailable
from ess.models.chat.styles import ChatStyle
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects import schemas
from ess.server.dialects.prompts import Prepared
from ess.server.dialects.schemas import Ask, TokenizeAsk
from ess.server.http.responses import Refused
from ess.server.process.bounds import (
    LOOP_BODY_BYTES,
    READ_QUEUE_BYTES,
    READ_S,
    READS_MAX,
    SHORT_BODY_BYTES,
)
from ess.server.process.text_child import Desk, Done, Failed, head_of

PROGRAM: Final = ("ess.server.process.text_child",)
LANE_BYTES: Final = (LOOP_BODY_BYTES, SHORT_BODY_BYTES)
TEMPLATED: Final = (
    *(schemas.ChatAsk, schemas.ResponsesAsk, schemas.MessagesAsk),
    *(schemas.CountTokensAsk, schemas.InputTokensAsk),
)
START_S: Final = 60.0
FINISH_S: Final = 1.0
ENDED: Final = "the process that reads texts ended twice; it is started again"


class Texts:
    def __init__(
        self,
        tokenizer: Tokenizer,
        style: ChatStyle,
        desk: Desk,
        *,
        read_s: float = READ_S,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._style_waits = style.waits
        self._reader = desk.reader(tokenizer, style)
        self.lanes = [Lane(desk, program, read_s=read_s) for _ in range(len(LANE_BYTES) + 1)]
        self._warming: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        """Starts the processes; a failed start is tried again when the process is needed."""
        needed = self.lanes if self._style_waits else self.lanes[1:]
        self._warming = [asyncio.ensure_future(lane.warm()) for lane in needed]

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        for task in self._warming:
            task.cancel()
        await asyncio.gather(*self._warming, return_exceptions=True)
        for lane in self.lanes:
            await lane.stop()

    @property
    def reading_count(self) -> int:
        """How many bodies text processes have or are waiting for them."""
        return sum(len(lane.sizes) for lane in self.lanes)

    def is_short(self, raw: bytes, kind: type[Ask]) -> bool:
        """Whether a body may be read on the loop: a short one without a template to wait for."""
        if len(raw) > LOOP_BODY_BYTES:
            return False
        if self._style_waits and kind is TokenizeAsk:
            return schemas.read(raw, TokenizeAsk).messages is None
        return not (self._style_waits and kind in TEMPLATED)

    def read(self, raw: bytes, kind: type[Ask]) -> Prepared[Ask]:
        """Reads a short body, on the loop."""
        return self._reader.read(raw, kind)

    async def read_apart(self, pieces: Sequence[bytes], kind: type[Ask]) -> Prepared[Ask]:
        """Reads a body in a text process; if cancelled, the work there ends too."""
        size = sum(map(len, pieces))
        self._check_queue(size)
        lane = self.lanes[sum(size > most for most in LANE_BYTES)]
        done = await lane.ask(pieces, kind.__name__)
        prepared = Prepared(
            ask=msgspec.msgpack.decode(done.ask, type=kind),
            prompts=[_ids(packed) for packed in done.prompts],
            is_many=done.is_many,
            document=done.document,
            forms=done.forms,
        )
        await asyncio.sleep(0)  # ids are packed for the engine in another turn of the loop
        return prepared

    def _check_queue(self, size: int) -> None:
        waiting = sum(sum(lane.sizes) for lane in self.lanes)
        if self.reading_count >= READS_MAX or (waiting and waiting + size > READ_QUEUE_BYTES):
            raise Refused(
                f"{self.reading_count} bodies of {waiting:,} bytes wait to be read; try again soon",
                reason="texts",
                retry_after_s=1.0,
            )


def _ids(packed: bytes) -> list[int]:
    return array.array("i", packed).tolist()


class Lane:
    """One text process; `sizes` are the bodies that it has or that wait for it."""

    def __init__(self, desk: Desk, program: Sequence[str], *, read_s: float) -> None:
        self._desk = desk
        self._program = program
        self._read_s = read_s
        self._turn = asyncio.Lock()
        self.process: asyncio.subprocess.Process | None = None
        self.sizes: list[int] = []

    async def warm(self) -> None:
        async with self._turn:
            with contextlib.suppress(Unavailable):
                await self._start()

    async def stop(self) -> None:
        await self._kill()

    async def ask(self, pieces: Sequence[bytes], kind: str) -> Done:
        """If the caller leaves while the work is under way, the work has FINISH_S to end: starting
        another process takes about as long."""
        size = sum(map(len, pieces))
        work = asyncio.ensure_future(self._in_turn(pieces, kind))
        self.sizes.append(size)
        work.add_done_callback(lambda _: self.sizes.remove(size))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(FINISH_S, work.cancel)
            work.add_done_callback(lambda _: work.cancelled() or work.exception())  # not to the log
            raise

    async def _in_turn(self, pieces: Sequence[bytes], kind: str) -> Done:
        async with self._turn:
            said = await self._tried_twice(pieces, kind)
        if isinstance(said, Failed):
            raise BadInput(said.sentence) if said.is_refusal else EssError(said.sentence)
        return said

    async def _tried_twice(self, pieces: Sequence[bytes], kind: str) -> Done | Failed:
        for _ in range(2):
            if self.process is None or self.process.returncode is not None:
                await self._start()
            try:
                return await asyncio.wait_for(self._exchange(pieces, kind), self._read_s)
            except TimeoutError:
                await self._kill()
                raise BadInput(
                    f"the body took more than {self._read_s:g} s to read and to encode"
                ) from None
            except (OSError, asyncio.IncompleteReadError):
                await self._kill()
            except asyncio.CancelledError:
                await asyncio.shield(self._kill())
                raise
        raise Unavailable(ENDED)

    async def _exchange(self, pieces: Sequence[bytes], kind: str) -> Done | Failed:
        process = self.process
        assert process is not None, "a process is started before it is asked"
        assert process.stdin is not None, "stdin is a pipe"
        assert process.stdout is not None, "stdout is a pipe"
        process.stdin.write(head_of(kind, sum(map(len, pieces))))
        for piece in pieces:
            process.stdin.write(piece)
            await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(8), "little")
        packed = await process.stdout.readexactly(size)
        answer: Done | Failed = msgspec.msgpack.decode(packed, type=Done | Failed)
        return answer

    async def _start(self) -> None:
        """Starts it in its own session: Ctrl-C does not reach it, and its children end with it."""
        await self._kill()
        self.process = await asyncio.create_subprocess_exec(
            *words_of(*self._program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"},
        )
        packed = msgspec.json.encode(self._desk)
        try:
            await asyncio.wait_for(self._exchange([packed], "Desk"), START_S)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            await self._kill()
            raise Unavailable("the process that reads texts does not start") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._kill())
            raise

    async def _kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
