"""Messages between workers: fixed binary structs, sealed with a shared secret. No torch.

    frame = head | body | tag        little endian
    head    magic, version, kind, body bytes, boot epoch of the sender, boot epoch of the receiver
    body    one fixed struct per kind; Hello, Reserved and Members end in a run whose length is sent
    tag     16 bytes of HMAC-SHA256 over head and body

A boot epoch is a random number that a worker draws at its start. A message names both ends by
epoch, so neither a restarted sender nor a restarted receiver is taken for its former self. Only a
first Hello, and the Members beside it, are sent to epoch 0, which is any receiver.

`Seal.opened` refuses everything but exactly one frame, before it allocates anything of a size that
the frame names. The tag covers every bit, so a frame that parses was written by a holder of the
secret. Rows do not travel in messages: a Piece says what landed and carries its checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from struct import Struct, error
from typing import Final, cast

import numpy as np

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.units import PAGE_ROWS

VERSION: Final = 3
MAGIC: Final = b"ESSH"
TAG_BYTES: Final = 16
NONCE_BYTES: Final = 16
DIGEST_BYTES: Final = 16
SECRET_BYTES_MIN: Final = 16
PAGES_MAX: Final = 1 << 15
ADDRESS_BYTES_MAX: Final = 1 << 16
UID_BITS: Final = 63
UID_MAX: Final = (1 << UID_BITS) - 1
TRANSFER_ID_CHARS_MAX: Final = 256
MEMBERS_MAX: Final = 64

_HEAD: Final = Struct("<4sBBHIQQ")
_UNIT_BYTES_MAX: Final = 1 << 40
_MEMBER: Final = Struct("<QHH")

FRAME_BYTES_MAX: Final = _HEAD.size + 4 * PAGES_MAX + 64 + TAG_BYTES


class PieceKind(IntEnum):
    ROWS = 1
    INDEX_KEYS = 2
    WINDOWS = 3
    STATE = 4

    @property
    def is_of_layers(self) -> bool:
        """Its units are pages of layers. Windows and states belong to a request as a whole."""
        return self in (PieceKind.ROWS, PieceKind.INDEX_KEYS)


class Reason(IntEnum):
    """Why a reservation was refused or a handoff given up. SETTLED is the answer to a Release: the
    sender has nothing of this handoff under way any more."""

    FULL = 1
    DUPLICATE = 2
    WRONG_LAYOUT = 3
    DEADLINE = 4
    ABORTED = 5
    DONE = 6
    WRONG_TEXT = 7
    UNKNOWN = 8
    SETTLED = 9


@dataclass(frozen=True, slots=True)
class Hello:
    """The sender and its layout. `answer` is the nonce of the Hello that this one answers."""

    layout: bytes
    page_rows: int
    nonce: bytes
    answer: bytes
    address: bytes = b""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The receiver has room for the rows of the first `token_count` tokens, whose digest is `text`.

    Page `first_page + i` of the prompt goes to host page `pages[i]`, of `pool_pages`; earlier pages
    are there already. `window_at` is the byte at which the windows land in their region. `ticket`
    is valid for this room alone: late bytes for a former room of the uid land nowhere.
    """

    uid: int
    ticket: int
    token_count: int
    text: bytes
    first_page: int
    pool_pages: int
    window_at: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    uid: int
    reason: Reason
    retry_ms: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages `page_begin..page_end` of the prompt have been written in each of the layers.

    `checksum` is the CRC-32 of the bytes, layer by layer and page by page.
    """

    uid: int
    kind: PieceKind
    layer_begin: int
    layer_end: int
    page_begin: int
    page_end: int
    byte_count: int
    checksum: int

    def __post_init__(self) -> None:
        _check_range(self)
        if not 0 < self.byte_count <= _UNIT_BYTES_MAX:
            raise BadInput(f"byte_count is {self.byte_count}, must be 1 to {_UNIT_BYTES_MAX}")


@dataclass(frozen=True, slots=True)
class Again:
    """The receiver lacks these pages: asks for them once more."""

    uid: int
    kind: PieceKind
    layer_begin: int
    layer_end: int
    page_begin: int
    page_end: int

    def __post_init__(self) -> None:
        _check_range(self)


@dataclass(frozen=True, slots=True)
class Count:
    uid: int
    arrived: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Release:
    """The handoff is over on this side: the other side may free the pages it holds for it."""

    uid: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Heartbeat:
    number: int


@dataclass(frozen=True, slots=True)
class Members:
    """Workers that hand prompts over together: the epoch of each and its layers
    `layer_begin..layer_end` of the whole model. The first is the lead, and seals this."""

    rows: tuple[tuple[int, int, int], ...]


Message = Hello | Reserved | Refused | Piece | Again | Count | Release | Heartbeat | Members

_FORMS: Final[dict[type[Message], tuple[int, Struct]]] = {
    Hello: (1, Struct("<32sI16s16sI")),
    Reserved: (2, Struct("<QQI16sIIQI")),
    Refused: (3, Struct("<QHI")),
    Piece: (4, Struct("<QBHHIIQI")),
    Again: (5, Struct("<QBHHII")),
    # 6 is free: the other kinds keep their numbers.
    Count: (7, Struct("<QQQ")),
    Release: (8, Struct("<QH")),
    Heartbeat: (9, Struct("<Q")),
    Members: (10, Struct("<H")),
}
_KINDS: Final = {number: (form, struct) for form, (number, struct) in _FORMS.items()}


@dataclass(frozen=True, slots=True)
class Envelope:
    message: Message
    sender: int
    receiver: int


class Seal:
    """Seals and opens frames with the secret of all workers of a deployment."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise BadInput(f"the secret has {len(secret)} bytes, needs {SECRET_BYTES_MIN}")
        self._secret = secret

    def sealed(self, message: Message, *, sender: int, receiver: int) -> bytes:
        number, struct = _FORMS[type(message)]
        try:
            body = _body(message, struct)
            head = _HEAD.pack(MAGIC, VERSION, number, 0, len(body), sender, receiver)
        except error as wrong:
            raise BadInput(f"{message!r:.200} does not fit its frame: {wrong}") from None
        return head + body + self._tag(head + body)

    def opened(self, frame: bytes | memoryview) -> Envelope:
        """The message of exactly one frame; for other bytes BadInput says what is wrong."""
        frame = bytes(frame[: FRAME_BYTES_MAX + 1])
        if not _HEAD.size + TAG_BYTES < len(frame) <= FRAME_BYTES_MAX:
            raise BadInput(f"a frame of {len(frame)} bytes, not of 45 to {FRAME_BYTES_MAX}")
        magic, version, number, zero, size, sender, receiver = _HEAD.unpack_from(frame)
        if magic != MAGIC or version != VERSION or zero:
            raise BadInput(f"a frame that begins {frame[:8]!r} is not of version {VERSION}")
        body = frame[_HEAD.size : -TAG_BYTES]
        if size != len(body):
            raise BadInput(f"the frame names {size} bytes of body and has {len(body)}")
        if not hmac.compare_digest(self._tag(frame[:-TAG_BYTES]), frame[-TAG_BYTES:]):
            raise BadInput("the frame's tag is not made with our secret")
        return Envelope(_message(number, body), sender, receiver)

    def _tag(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, "sha256")[:TAG_BYTES]


def new_epoch() -> int:
    return secrets.randbits(63) + 1


def checksum(parts: Iterable[bytes | memoryview]) -> int:
    """CRC-32 of the joined parts: finds every flip of up to 32 neighbouring bits."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def text_digest(tokens: Sequence[int], salt: bytes) -> bytes:
    """Equal on two workers if rows of these tokens, kept under this salt, are the same rows."""
    digest = hashlib.blake2b(len(salt).to_bytes(8, "little") + salt, digest_size=DIGEST_BYTES)
    digest.update(np.asarray(tokens, "<i8").tobytes())
    return digest.digest()


def new_uid() -> int:
    """A random number for a handoff that only we name. Zero is valid too: SGLang's routers draw
    from 0 to UID_MAX."""
    return secrets.randbits(UID_BITS)


def uid_of(transfer_id: object, place: int = 0) -> int:
    """The handoff number that both workers derive from a router's id for prompt `place`."""
    if not isinstance(transfer_id, str) or not 0 < len(transfer_id) <= TRANSFER_ID_CHARS_MAX:
        raise BadInput(
            f"kv_transfer_params.transfer_id must be a text of 1 to {TRANSFER_ID_CHARS_MAX}"
            " characters"
        )
    named = b"%d %b" % (place, transfer_id.encode(errors="replace"))
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest()) & UID_MAX


def layout_hash(layout: ModelLayout, *, weights: str = "") -> bytes:
    """Equal on two workers if one may read rows of the other.

    `weights` names what was loaded; the name under which a model is served does not matter.
    """
    compared = {part.name for part in fields(layout) if part.compare} - {"name"}
    meant = {key: value for key, value in asdict(layout).items() if key in compared}
    return hashlib.sha256(
        repr((VERSION, PAGE_ROWS, weights, sorted(meant.items()))).encode()
    ).digest()


def _check_range(piece: Piece | Again) -> None:
    for what, begin, end in (
        ("layers", piece.layer_begin, piece.layer_end),
        ("pages", piece.page_begin, piece.page_end),
    ):
        if not 0 <= begin < end:
            raise BadInput(f"{what} {begin}..{end} of request {piece.uid} are not a range")


def _body(message: Message, struct: Struct) -> bytes:
    match message:
        case Hello():
            _check_hello(message)
            size = len(message.address)
            fixed = (message.layout, message.page_rows, message.nonce, message.answer, size)
            return struct.pack(*fixed) + message.address
        case Reserved():
            return _reserved_body(message, struct)
        case Members():
            _check_members(message)
            tail = b"".join(_MEMBER.pack(*row) for row in message.rows)
            return struct.pack(len(message.rows)) + tail
    return struct.pack(*(getattr(message, field.name) for field in fields(message)))


def _reserved_body(reserved: Reserved, struct: Struct) -> bytes:
    count = len(reserved.pages)
    if count > PAGES_MAX:
        raise BadInput(f"request {reserved.uid}: {count} pages, at most {PAGES_MAX}")
    if len(reserved.text) != DIGEST_BYTES:
        raise BadInput(f"request {reserved.uid}: a text digest of {len(reserved.text)} bytes")
    *fixed, pages = (getattr(reserved, field.name) for field in fields(reserved))
    return struct.pack(*fixed, count) + Struct(f"<{count}I").pack(*pages)


def _check_hello(hello: Hello) -> None:
    sizes = len(hello.layout), len(hello.nonce), len(hello.answer)
    if sizes != (32, NONCE_BYTES, NONCE_BYTES):
        raise BadInput(f"a Hello with layout, nonce and answer of {sizes} bytes")
    if len(hello.address) > ADDRESS_BYTES_MAX:
        raise BadInput(f"an address of {len(hello.address)} bytes, at most {ADDRESS_BYTES_MAX}")


def _check_members(members: Members) -> None:
    rows = members.rows
    if not 0 < len(rows) <= MEMBERS_MAX:
        raise BadInput(f"{len(rows)} workers hand over together, must be 1 to {MEMBERS_MAX}")
    if len({epoch for epoch, _, _ in rows}) != len(rows):
        raise BadInput(f"of {len(rows)} workers that hand over together two have the same epoch")
    for epoch, begin, end in rows:
        if not epoch or not 0 <= begin < end:
            raise BadInput(f"peer {epoch:016x} has layers {begin}..{end}, which are not a range")


def _message(number: int, body: bytes) -> Message:
    if number not in _KINDS:
        raise BadInput(f"message kind {number} is unknown")
    form, struct = _KINDS[number]
    if len(body) < struct.size:
        raise BadInput(f"a {form.__name__} of {len(body)} bytes, not of {struct.size}")
    values, tail = struct.unpack_from(body), body[struct.size :]
    if form is Hello:
        return _hello(values, tail)
    if form is Reserved:
        return _reserved(values, tail)
    if form is Members:
        return _members(values, tail)
    _check_tail(form, 0, tail)
    return _fixed(form, values)


def _fixed(form: Callable[..., Message], values: Sequence[int]) -> Message:
    enums = {"PieceKind": PieceKind, "Reason": Reason}
    types = [str(field.type) for field in fields(cast("type[Message]", form))]
    try:
        return form(
            *(enums.get(name, int)(value) for name, value in zip(types, values, strict=True))
        )
    except ValueError as wrong:
        raise BadInput(f"a message says {wrong}") from None


def _hello(values: tuple[bytes, int, bytes, bytes, int], tail: bytes) -> Hello:
    layout, page_rows, nonce, answer, size = values
    _check_tail(Hello, size, tail)
    return Hello(layout, page_rows, nonce, answer, tail)


def _reserved(values: tuple[int, int, int, bytes, int, int, int, int], tail: bytes) -> Reserved:
    uid, ticket, token_count, text, first_page, pool_pages, window_at, count = values
    if count > PAGES_MAX:
        raise BadInput(f"a Reserved names {count} pages, at most {PAGES_MAX}")
    _check_tail(Reserved, 4 * count, tail)
    pages = Struct(f"<{count}I").unpack(tail)
    return Reserved(uid, ticket, token_count, text, first_page, pool_pages, window_at, pages)


def _members(values: tuple[int], tail: bytes) -> Members:
    (count,) = values
    if count > MEMBERS_MAX:
        raise BadInput(f"a Members names {count} workers, at most {MEMBERS_MAX}")
    _check_tail(Members, _MEMBER.size * count, tail)
    members = Members(tuple(_MEMBER.iter_unpack(tail)))
    _check_members(members)
    return members


def _check_tail(form: type[Message], size: int, tail: bytes) -> None:
    if size != len(tail):
        raise BadInput(f"a {form.__name__} with {len(tail)} bytes behind it, not {size}")
