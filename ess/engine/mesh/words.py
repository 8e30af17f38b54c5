"""The messages between the ranks of a mesh, beside the hidden states.

    rank 0 to all      calls: what was asked of its engine; Met: how a step begins
    last stage to all  StepTokens: what a step says, by way of rank 0
    rank 0 to all      HandoffRoom, HandoffsEnded: what becomes of a handoff (`mesh.port`)
    rank 0 to all      Compiled, Allowed: what its grammars say (`mesh.grammars`)
    last stage to all  Scored: chances of tokens of prompts, by way of rank 0
    all to all         Holds: once, what the pools hold, by way of rank 0
    all to all         Counts: of pages on disks, where one may hold a prompt, by way of rank 0

A message of any size travels as frames of bounded size: the first byte of each says whether more
of it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from ess.comm.link import HEAD_BYTES_MAX, Link, next_frame
from ess.engine.process.messages import as_dict
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.sampling import Sampling
from ess.engine.tpot_control import Limits

MORE: Final = b"+"
LAST: Final = b"."
PIECE_BYTES: Final = HEAD_BYTES_MAX - 1


class Added(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`leader` is the number of an earlier request, `take` those of a handoff and its peer, and
    whether its rows are invented."""

    prompt: list[int]
    sampling: Sampling
    priority: int = 0
    leader: int | None = None
    salt: bytes = b""
    prior_output: list[int] = []
    take: tuple[int, int, bool] | None = None


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Preempted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Forgot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Cached prefixes were forgotten."""


class Learned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The steps under way were learned."""


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`limits` are given where they are no longer those of the step before."""

    limits: Limits | None = None


class Pumped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


Call: TypeAlias = (
    Added | Cancelled | Preempted | Resumed | Forgot | Learned | Stepped | Pumped | Closed
)


class Met(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a rank's engine is about to do, and what is free in its pools. Whether the step `splits`
    may depend on more than the calls, so rank 0 decides it."""

    step: int
    token_count: int
    chunk_tokens: int
    draft_count: int
    free: tuple[int, ...]
    splits: bool


class Holds(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a rank's pools hold, by account; then the least of it, from rank 0."""

    capacities: dict[str, int]


class Counts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How many pages of each load this rank has, -1 while more may come; empty before a handoff.
    Rank 0 answers with the least of each count."""

    counts: list[int]


class Full(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a PoolFull."""

    limiter: str
    needed: int
    free: int


class HandoffRoom(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A handoff is awaited, on pages with this digest; or it is refused, and why."""

    uid: int
    pages: int = 0
    fault: str = ""
    full: Full | None = None


class End(msgspec.Struct, frozen=True, array_like=True):
    """How a handoff ended: it has landed, with windows of all groups; or it will not, and why; or
    neither, where it had been given up."""

    uid: int
    has_landed: bool = False
    fault: str = ""
    windows: tuple[tuple[bytes, bytes], ...] = ()
    window_count: int = 0


class HandoffsEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Handoffs that have ended since the last one."""

    ends: tuple[End, ...]


class RequestTokens(msgspec.Struct, frozen=True, array_like=True):
    """What `Choice` has of one request, and drafts."""

    tokens: tuple[int, ...]
    chances: tuple[Chance, ...] = ()
    is_broken: bool = False
    drafts: tuple[int, ...] = ()


class StepTokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`fed` is a digest of what the step was fed with."""

    fed: int
    made: tuple[RequestTokens, ...]


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """By number, requests that no longer wait for their grammar: an empty text, or why it is
    refused."""

    faults: dict[int, str]


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """A request's masks, a bit per token, for as many of its queries as count; and why its grammar
    can no longer be followed, if it cannot."""

    count: int
    bits: bytes
    failure: str


class Allowed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of each request of a step that has a grammar, in the step's order."""

    masks: tuple[Masks, ...]


class Scored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of each chunk of a pack of prompts."""

    chances: tuple[tuple[Chance, ...], ...]


Aside: TypeAlias = (
    Holds | Counts | Met | StepTokens | HandoffRoom | HandoffsEnded | Compiled | Allowed | Scored
)
Word: TypeAlias = Call | Aside

_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=as_dict)
_DECODER: Final[msgspec.msgpack.Decoder[Word]] = msgspec.msgpack.Decoder(Word)


def packed(word: Word) -> bytes:
    return _ENCODER.encode(word)


def unpacked(content: bytes) -> Word:
    return _DECODER.decode(content)


def send(links: Sequence[Link], word: Word) -> None:
    pieces = list(_pieces(packed(word)))
    for link in links:
        for piece in pieces:
            link.send(piece)


def receive(link: Link) -> Word:
    """Waits for it. LinkLost if the group ends before."""
    content = bytearray()
    while True:
        frame = next_frame(link)
        content += frame.head[1:]
        if frame.head[:1] == LAST:
            return unpacked(bytes(content))


def _pieces(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), PIECE_BYTES):
        is_last = start + PIECE_BYTES >= len(content)
        yield (LAST if is_last else MORE) + content[start : start + PIECE_BYTES]
