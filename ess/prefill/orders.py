"""The lead's orders. Every stage obeys the same orders in the same sequence. Needs no torch.

    Open    room for a prompt; `cached_count` of its rows are in the pools already, on every stage
    Load    this many pages of a prompt have come from every stage's disk: they count from now on
    Enter   a prompt that has loaded takes its room on the device, and its handoff begins
    Run     chunks of open prompts, as one micro-batch: the only order that carries a tensor
    GiveUp  no more chunks of the prompt come; a prompt that is incomplete is closed at once
    Close   every stage has finished handing over the prompt's rows

Only orders change pools. Their allocators are deterministic, so the pools of all stages stay alike:
the same pages, the same cached prefixes, without further agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np

from ess.errors import BadInput
from ess.prefill import records

TEXT_MAX: Final = 1 << 17
SALT_BYTES_MAX: Final = 1 << 16
PARTS_MAX: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of the prompt `number` that do not fit into its Open; they come before it."""

    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Opens a prompt whose rows handoff `uid` gives. With `load_max` every stage reads from its
    disk at most that many pages behind the cached rows, and reports how many came (Counted)."""

    number: int
    uid: int
    cached_count: int
    load_max: int = 0
    salt: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    number: int
    page_count: int


@dataclass(frozen=True, slots=True)
class Enter:
    number: int


@dataclass(frozen=True, slots=True)
class Part:
    """Positions [start, stop) of a prompt. Only the last part of a prompt may be empty."""

    number: int
    start: int
    stop: int
    is_last: bool

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop or (self.start == self.stop and not self.is_last):
            raise BadInput(
                f"chunk {self.start}..{self.stop} of prompt {self.number} is not a range"
            )


@dataclass(frozen=True, slots=True)
class Run:
    """A micro-batch; each prompt has at most one part in it."""

    batch: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        numbers = {part.number for part in self.parts}
        if not 0 < len(self.parts) == len(numbers) <= PARTS_MAX:
            raise BadInput(f"batch {self.batch}: {len(self.parts)} parts of {len(numbers)} prompts")

    @property
    def token_count(self) -> int:
        return sum(part.stop - part.start for part in self.parts)


@dataclass(frozen=True, slots=True)
class GiveUp:
    number: int


@dataclass(frozen=True, slots=True)
class Close:
    number: int


@dataclass(frozen=True, slots=True)
class Meet:
    """Makes the stage meet another worker, by its sealed metadata."""

    metadata: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """Forgets cached prefixes."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A micro-batch of `count` made-up tokens, to measure; it leaves nothing behind."""

    batch: int
    count: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the group in order."""


Order = Text | Open | Load | Enter | Run | GiveUp | Close | Meet | Forget | Profile | Stop

_OPEN: Final = Struct("<QQQII")
_LOAD: Final = Struct("<QI")
_PART: Final = Struct("<QQQ?")
_NUMBER: Final = Struct("<Q")
_PROFILE: Final = Struct("<QQ")
_NONE: Final = Struct("")


def pack(order: Order) -> bytes:
    """The order as a record."""
    match order:
        case Text(number, tokens):
            return records.record(1, _NUMBER.pack(number) + _packed_ids(tokens))
        case Open():
            return records.record(2, _opening(order))
        case Run(batch, parts):
            packed = (_PART.pack(p.number, p.start, p.stop, p.is_last) for p in parts)
            return records.record(3, _NUMBER.pack(batch) + b"".join(packed))
        case GiveUp(number):
            return records.record(4, _NUMBER.pack(number))
        case Close(number):
            return records.record(5, _NUMBER.pack(number))
        case Meet(metadata):
            return records.record(6, metadata)
        case Forget():
            return records.record(7, b"")
        case Profile(batch, count):
            return records.record(8, _PROFILE.pack(batch, count))
        case Stop():
            return records.record(9, b"")
        case Load(number, page_count):
            return records.record(10, _LOAD.pack(number, page_count))
        case Enter(number):
            return records.record(11, _NUMBER.pack(number))


def unpack(content: bytes) -> list[Order]:
    return [_order(kind, body) for kind, body in records.records(content)]


def cut(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits a prompt's tokens for Texts; the last piece is for the Open behind them."""
    return [tuple(tokens[at : at + TEXT_MAX]) for at in range(0, len(tokens), TEXT_MAX)]


def _order(kind: int, body: bytes) -> Order:
    match kind:
        case 1:
            (number,), tail = records.leading(_NUMBER, body, "a text")
            return Text(number, _ids(tail))
        case 2:
            return _opened(body)
        case 3:
            return _run(body)
        case 4:
            return GiveUp(*records.fixed(_NUMBER, body, "a give-up"))
        case 5:
            return Close(*records.fixed(_NUMBER, body, "a close"))
        case 6:
            return Meet(body)
        case 7:
            return Forget(*records.fixed(_NONE, body, "a forget"))
        case 8:
            return Profile(*records.fixed(_PROFILE, body, "a profile"))
        case 9:
            return Stop(*records.fixed(_NONE, body, "a stop"))
        case 10:
            return Load(*records.fixed(_LOAD, body, "a load"))
        case 11:
            return Enter(*records.fixed(_NUMBER, body, "an enter"))
    raise BadInput(f"an order of kind {kind} is unknown")


def _opening(order: Open) -> bytes:
    if len(order.salt) > SALT_BYTES_MAX:
        raise BadInput(f"the salt has {len(order.salt)} bytes, at most {SALT_BYTES_MAX}")
    numbers = (order.number, order.uid, order.cached_count, order.load_max)
    return _OPEN.pack(*numbers, len(order.salt)) + order.salt + _packed_ids(order.tokens)


def _opened(body: bytes) -> Open:
    (number, uid, cached_count, load_max, salt_size), tail = records.leading(_OPEN, body, "an open")
    if salt_size > min(len(tail), SALT_BYTES_MAX):
        raise BadInput(f"an open names a salt of {salt_size} bytes and has {len(tail)}")
    return Open(
        number=number,
        uid=uid,
        cached_count=cached_count,
        load_max=load_max,
        salt=tail[:salt_size],
        tokens=_ids(tail[salt_size:]),
    )


def _run(body: bytes) -> Run:
    (batch,), tail = records.leading(_NUMBER, body, "a run")
    if len(tail) % _PART.size or len(tail) > PARTS_MAX * _PART.size:
        raise BadInput(f"the parts of batch {batch} have {len(tail)} bytes")
    return Run(batch, tuple(Part(*values) for values in _PART.iter_unpack(tail)))


def _packed_ids(tokens: tuple[int, ...]) -> bytes:
    if len(tokens) > TEXT_MAX:
        raise BadInput(f"{len(tokens)} tokens in an order, at most {TEXT_MAX}")
    return np.asarray(tokens, "<u4").tobytes()


def _ids(tail: bytes) -> tuple[int, ...]:
    if len(tail) % 4 or len(tail) > 4 * TEXT_MAX:
        raise BadInput(f"{len(tail)} bytes of tokens, must be 4 for each of at most {TEXT_MAX}")
    return tuple(np.frombuffer(tail, "<u4").tolist())
