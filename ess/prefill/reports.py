"""The reports of a stage to the lead. Needs no torch.

Hello     once: describes the stage, so that the lead can check that all stages fit together
Took      a frame of orders was obeyed; what is free in its pools, which must be equal in all
Counted   how many pages of a prompt came from its disk, from the first wanted page on
Ran       a micro-batch went through its layers
Released  the handoff of a prompt's rows is over, and nothing reads them any more
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Final

from ess.errors import BadInput
from ess.prefill import records

DIGEST_BYTES: Final = 32
SENTENCE_BYTES_MAX: Final = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A stage's layers, the pages of its pools, a digest of the whole model, and the metadata by
    which other workers connect to it."""

    first_layer: int
    stop_layer: int
    host_pages: int
    index_pages: int
    model: bytes
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Free:
    """What is free in a stage's pools, and how many pages are kept as cached prefixes."""

    host_pages: int
    index_pages: int
    idle_pages: int
    lines: int


@dataclass(frozen=True, slots=True)
class Took:
    frame: int
    free: Free


@dataclass(frozen=True, slots=True)
class Counted:
    number: int
    page_count: int


@dataclass(frozen=True, slots=True)
class Ran:
    batch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Released:
    """`reason` is a Reason of the transfer; `sentence` says why a handoff was not sent."""

    number: int
    reason: int
    sentence: str = ""


Report = Hello | Took | Counted | Ran | Released

_HELLO: Final = Struct(f"<QQQQ{DIGEST_BYTES}s")
_TOOK: Final = Struct("<QQQQQ")
_COUNTED: Final = Struct("<QI")
_RAN: Final = Struct("<Qd")
_RELEASED: Final = Struct("<QH")


def pack(reports: Iterable[Report]) -> bytes:
    return records.head(map(_packed, reports))


def unpack(content: bytes) -> list[Report]:
    return [_report(kind, body) for kind, body in records.records(content)]


def _packed(report: Report) -> bytes:
    match report:
        case Hello(
            first_layer=first, stop_layer=stop, host_pages=host, index_pages=index, model=model
        ):
            if len(model) != DIGEST_BYTES:
                raise BadInput(f"a digest of {len(model)} bytes, not {DIGEST_BYTES}")
            fixed = _HELLO.pack(first, stop, host, index, model)
            return records.record(1, fixed + report.metadata)
        case Took(frame, Free(host, index, idle, lines)):
            return records.record(2, _TOOK.pack(frame, host, index, idle, lines))
        case Ran(batch, seconds):
            return records.record(3, _RAN.pack(batch, seconds))
        case Released(number, reason, sentence):
            tail = sentence.encode()[:SENTENCE_BYTES_MAX]
            return records.record(4, _RELEASED.pack(number, reason) + tail)
        case Counted(number, page_count):
            return records.record(5, _COUNTED.pack(number, page_count))


def _report(kind: int, body: bytes) -> Report:
    match kind:
        case 1:
            return _hello(body)
        case 2:
            frame, *free = records.fixed(_TOOK, body, "a took")
            return Took(frame, Free(*free))
        case 3:
            batch, seconds = records.fixed(_RAN, body, "a ran")
            if not 0 <= seconds < float("inf"):
                raise BadInput(f"batch {batch} ran for {seconds} s")
            return Ran(batch, seconds)
        case 4:
            (number, reason), tail = records.leading(_RELEASED, body, "a released")
            if len(tail) > SENTENCE_BYTES_MAX:
                raise BadInput(f"a sentence of {len(tail)} bytes, at most {SENTENCE_BYTES_MAX}")
            return Released(number, reason, tail.decode(errors="replace"))
        case 5:
            return Counted(*records.fixed(_COUNTED, body, "a counted"))
    raise BadInput(f"a report of kind {kind} is unknown")


def _hello(body: bytes) -> Hello:
    if len(body) < _HELLO.size:
        raise BadInput(f"a hello has {len(body)} bytes, not {_HELLO.size} and more")
    first, stop, host, index, model = _HELLO.unpack_from(body)
    return Hello(
        first_layer=first,
        stop_layer=stop,
        host_pages=host,
        index_pages=index,
        model=model,
        metadata=body[_HELLO.size :],
    )
