"""What the server process and the engine process say to each other. Needs no torch.

    server -> engine   Add, Abort, Flush, Stop
    engine -> server   Ready once, then Progress after every step and Status a few times a second

Each is one msgpack array, its type first. The server numbers requests; a number is never used
again, so a late answer can only meet a request that is gone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ess.errors import BadInput

GrammarKind = Literal["json_schema", "json_object", "regex", "lark"]
Reason = Literal["length", "stop", "cancelled", "refused"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    kind: GrammarKind
    text: str


class Wish(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one request is sampled: the fields of `ess.engine.sampling.Sampling`."""

    tokens_max: int
    tokens_min: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    prompt: list[int]
    wish: Wish


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Flush(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget cached prefixes."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the process; requests still in it are given up."""


class Chance(msgspec.Struct, frozen=True, array_like=True):
    """What a made token was worth: its log probability, its rank from 1, and the likeliest."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What a step did for one request. `cached_count` comes with the first piece only."""

    number: int
    tokens: tuple[int, ...] = ()
    reason: Reason | None = None
    cached_count: int | None = None
    chances: tuple[Chance, ...] = ()
    sentence: str = ""


class PoolUse(msgspec.Struct, frozen=True, array_like=True):
    name: str
    used: int
    capacity: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    vocabulary: int
    length_max: int
    load_s: float
    lacks: tuple[str, ...] = ()
    """Fields of `Wish` that this engine does not serve."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pieces: tuple[Piece, ...]


class Status(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The engine at one moment: counts since it started, per layer group where a list."""

    step_count: int = 0
    step_s: float = 0.0
    running_count: int = 0
    waiting_count: int = 0
    preempted_count: int = 0
    made_count: int = 0
    prompt_count: int = 0
    cached_count: int = 0
    limiter: str | None = None
    pools: tuple[PoolUse, ...] = ()
    hits: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    fetched_bytes: tuple[int, ...] = ()
    stored_bytes: tuple[int, ...] = ()
    slots_used: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()

    @property
    def fullness(self) -> float:
        """Of the pool that is fullest; slots are not counted, they are meant to be full."""
        return max((pool.used / max(pool.capacity, 1) for pool in self.pools), default=0.0)


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`sentence` says why nothing was forgotten, if nothing was."""

    sentence: str = ""


class Fault(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last word of an engine that cannot go on."""

    sentence: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine process is told at its start."""

    model: str
    form: Literal["bf16", "f32"] = "bf16"
    row: Literal["fp8", "bf16", "f32"] = "fp8"
    index: Literal["fp8", "f32"] = "fp8"
    backend: Literal["cpu", "reference"] = "cpu"
    modes: str = "dba"
    mtp: int = 1
    batch_max: int = 16
    chunk_tokens: int = 512
    length_max: int = 4096
    slot_bytes: int
    host_bytes: int
    index_bytes: int | None = None
    threads: int = 1
    warm: bool = True
    verify_every: int = 0


ToEngine = Add | Abort | Flush | Stop
FromEngine = Ready | Progress | Status | Flushed | Fault


class Packer:
    """Messages to bytes and back; one encoder and decoder are kept for all."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def pack(self, message: ToEngine | FromEngine) -> bytes:
        return self._encoder.encode(message)

    def for_engine(self, raw: bytes) -> ToEngine:
        try:
            return self._to_engine.decode(raw)
        except msgspec.MsgspecError as error:
            raise BadInput(f"a message to the engine is malformed: {error}") from None

    def for_server(self, raw: bytes) -> FromEngine:
        try:
            return self._from_engine.decode(raw)
        except msgspec.MsgspecError as error:
            raise BadInput(f"a message from the engine is malformed: {error}") from None
