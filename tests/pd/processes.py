"""Engines as processes of their own, each with a front that is this process."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import zmq

from ess.engine.config import ProcessConfig
from ess.engine.process.messages import (
    Add,
    Fault,
    FromEngine,
    Handoff,
    Launch,
    Meet,
    Met,
    Packer,
    Piece,
    Progress,
    Rank,
    Ready,
    Status,
    Stop,
    ToEngine,
)
from ess.models.load import EMBEDDED
from tests.support.forked import started

PATIENCE_MS = 180_000
SECRET = "a secret of all workers"


class EngineProcess:
    """`said` is what each request has been given so far."""

    def __init__(
        self,
        folder: Path,
        *,
        secret: str = SECRET,
        module: str = "ess.engine.process.worker",
        rank: Rank | None = None,
        model: Path = EMBEDDED,
        **config: object,
    ) -> None:
        folder.mkdir()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        endpoint = f"ipc://{folder}/engine"
        self._socket.bind(endpoint)
        self._packer = Packer()
        self.said: dict[int, list[Piece]] = {}
        self.status = Status()
        words = ["-m", module, endpoint]
        self.process = started("engine", words, stdin=subprocess.PIPE)
        self.launch = Launch(
            model=str(model),
            config=ProcessConfig(**{"form": "f32", "row": "f32", "threads": 1, **config}),
            length_max=2048,
            slot_bytes=24 << 20,
            host_bytes=48 << 20,
            index_bytes=16 << 20,
            secret=secret,
            rank=rank,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.launch) + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._socket.close(linger=0)
        self._context.term()

    def say(self, message: ToEngine) -> None:
        self._socket.send(self._packer.pack(message))

    def hear(self) -> FromEngine:
        message = self._packer.for_server(self._socket.recv())
        if isinstance(message, Progress):
            for piece in message.pieces:
                self.said.setdefault(piece.number, []).append(piece)
        elif isinstance(message, Status):
            self.status = message
        return message

    def until(self, is_so: Callable[[FromEngine], bool]) -> FromEngine:
        while not is_so(message := self.hear()):
            assert not isinstance(message, Fault), message
        return message

    def ready(self) -> Ready:
        message = self.until(lambda message: isinstance(message, Ready))
        assert isinstance(message, Ready)
        return message

    def meet(self, metadata: bytes, address: str = "other") -> Met:
        self.say(Meet(address, metadata))
        met = self.until(lambda message: isinstance(message, Met))
        assert isinstance(met, Met)
        return met

    def ended(self, *numbers: int) -> None:
        """Until these requests have ended."""
        self.until(lambda _: all(self.reason(number) for number in numbers))

    def reason(self, number: int) -> str | None:
        return next((piece.reason for piece in self.said.get(number, []) if piece.reason), None)

    def tokens(self, number: int) -> list[int]:
        return [token for piece in self.said.get(number, []) for token in piece.tokens]

    def stop(self) -> int:
        self.say(Stop())
        return self.process.wait(timeout=PATIENCE_MS / 1000)


@contextlib.contextmanager
def engines(folder: Path, *configs: dict[str, object]) -> Iterator[list[EngineProcess]]:
    made: list[EngineProcess] = []
    try:
        for number, config in enumerate(configs):
            made.append(EngineProcess(folder / str(number), **config))
        yield made
    finally:
        for engine in made:
            engine.close()


def expected(folder: Path, asked: Sequence[Add], *, mtp: int = 1) -> list[list[int]]:
    """The tokens that an engine without handoffs makes of these requests."""
    folder.mkdir(exist_ok=True)
    with engines(folder, {"secret": "", "mtp": mtp}) as [alone]:
        assert not alone.ready().metadata
        for add in asked:
            alone.say(add)
        alone.ended(*(add.number for add in asked))
        return [alone.tokens(add.number) for add in asked]


def introduce(prefill: EngineProcess, decode: EngineProcess, theirs: bytes, ours: bytes) -> int:
    """Both meet; the epoch under which the prefill worker is known."""
    assert not prefill.meet(ours, "decode").sentence
    met = decode.meet(theirs, "prefill")
    assert not met.sentence
    return met.epoch


def handed_over(
    add: Add, prefill: EngineProcess, decode: EngineProcess, *, uid: int, peer: int
) -> None:
    give = msgspec.structs.replace(
        add, handoff=Handoff(uid), sampling=dataclasses.replace(add.sampling, tokens_max=1)
    )
    decode.say(msgspec.structs.replace(add, handoff=Handoff(uid, peer, "take")))
    prefill.say(give)


def adds(prompts: Sequence[Sequence[int]], sampling) -> list[Add]:
    return [Add(number, list(prompt), sampling) for number, prompt in enumerate(prompts)]
