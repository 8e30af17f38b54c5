"""Messages survive the trip; nothing else is taken for one."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.errors import BadInput
from ess.layout import ModelLayout, RowCodec
from ess.transfer.messages import (
    ADDRESS_BYTES_MAX,
    FRAME_BYTES_MAX,
    PAGES_MAX,
    UID_MAX,
    Again,
    Count,
    Envelope,
    Heartbeat,
    Hello,
    Message,
    Piece,
    PieceKind,
    Reason,
    Refused,
    Release,
    Reserved,
    Seal,
    checksum,
    layout_hash,
    text_digest,
    uid_of,
)

SEAL = Seal(b"0123456789abcdef")

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(PieceKind)
reasons = st.sampled_from(Reason)
sixteen = st.binary(min_size=16, max_size=16)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int, int]:
    layer, page = draw(st.integers(0, 65_534)), draw(st.integers(0, 2**32 - 2))
    return (
        *(layer, draw(st.integers(layer + 1, 65_535))),
        *(page, draw(st.integers(page + 1, 2**32 - 1))),
    )


messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        *(Hello, st.binary(min_size=32, max_size=32), u32, sixteen, sixteen),
        st.binary(max_size=300),
    ),
    st.builds(
        *(Reserved, u64, u64, u32, sixteen, u32, u32, u64),
        st.lists(u32, max_size=100).map(tuple),
    ),
    st.builds(Refused, u64, reasons, u32),
    st.tuples(u64, kinds, ranges(), st.integers(1, 1 << 40), u32).map(
        lambda values: Piece(values[0], values[1], *values[2], *values[3:])
    ),
    st.tuples(u64, kinds, ranges()).map(lambda values: Again(values[0], values[1], *values[2])),
    st.builds(Count, u64, u64, u64),
    st.builds(Release, u64, reasons),
    st.builds(Heartbeat, u64),
)

EACH = [
    Hello(bytes(32), 64, bytes(16), bytes(16), b"4000 10.0.0.1"),
    Reserved(1, 7, 131_071, bytes(range(16)), 2, 4_000, 1 << 20, (5, 6, 9)),
    Refused(1, Reason.FULL, 1_000),
    Piece(1, PieceKind.ROWS, 0, 1, 0, 16, 16 * 41_984, 0xDEADBEEF),
    Again(1, PieceKind.INDEX_KEYS, 3, 4, 0, 1),
    Count(1, 5, 9),
    Release(1, Reason.DONE),
    Heartbeat(7),
]


@given(messages, u64, u64)
def test_a_message_is_read_as_it_was_written(message: Message, sender: int, receiver: int) -> None:
    frame = SEAL.sealed(message, sender=sender, receiver=receiver)
    assert len(frame) <= FRAME_BYTES_MAX
    assert SEAL.opened(frame) == Envelope(message, sender, receiver)
    assert SEAL.opened(memoryview(frame)) == Envelope(message, sender, receiver)


@pytest.mark.parametrize("message", EACH, ids=lambda message: type(message).__name__)
def test_every_flip_of_a_bit_and_every_cut_is_refused(message: Message) -> None:
    frame = SEAL.sealed(message, sender=2**64 - 1, receiver=1)
    for bit in range(8 * len(frame)):
        wrong = bytearray(frame)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadInput):
            SEAL.opened(bytes(wrong))
    for size in range(len(frame)):
        with pytest.raises(BadInput):
            SEAL.opened(frame[:size])
    with pytest.raises(BadInput):
        SEAL.opened(frame + b"\0")


def junk(count: int) -> Iterator[bytes]:
    """Noise, and frames that were good before something happened to them."""
    draw = random.Random(5)
    good = [SEAL.sealed(message, sender=1, receiver=2) for message in EACH]
    for number in range(count):
        if number % 2:
            yield draw.randbytes(draw.choice((0, 1, 44, 45, 70, 300)))
            continue
        frame = bytearray(draw.choice(good))
        begin = draw.randrange(len(frame))
        frame[begin : begin + 9] = draw.randbytes(draw.randrange(1, 20))
        yield bytes(frame)


def test_junk_is_refused_in_bounded_memory() -> None:
    refused = 0
    tracemalloc.start()
    for frame in junk(100_000):
        try:
            SEAL.opened(frame)
        except BadInput:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused == 100_000
    assert peak < 1 << 20


class NoTag(Seal):
    """A peer that holds the secret may still send nonsense."""

    def _tag(self, content: bytes) -> bytes:
        return bytes(16)


def test_nonsense_by_a_holder_of_the_secret_is_refused_as_well() -> None:
    careless = NoTag(b"0123456789abcdef")
    draw = random.Random(6)
    good = [careless.sealed(message, sender=1, receiver=2) for message in EACH]
    understood = 0
    for _ in range(20_000):
        frame = bytearray(draw.choice(good))
        for _ in range(draw.randint(1, 4)):
            frame[draw.randrange(len(frame) - 16)] = draw.randrange(256)
        try:
            envelope = careless.opened(bytes(frame))
        except BadInput:
            continue
        understood += 1
        written = careless.sealed(
            envelope.message, sender=envelope.sender, receiver=envelope.receiver
        )
        assert written == bytes(frame), "what is understood has one spelling"
    assert understood > 1_000


def reserved(pages: tuple[int, ...]) -> Reserved:
    return Reserved(1, 7, 64 * len(pages), bytes(16), 0, 1 << 20, 0, pages)


def test_a_frame_that_promises_much_costs_nothing() -> None:
    frame = bytearray(SEAL.sealed(reserved(()), sender=1, receiver=2))
    frame[8:12] = (2**32 - 1).to_bytes(4, "little")
    with pytest.raises(BadInput, match="names 4294967295 bytes of body and has 56"):
        SEAL.opened(bytes(frame))
    tracemalloc.start()
    with pytest.raises(BadInput):
        SEAL.opened(memoryview(bytearray(64 << 20)))
    assert tracemalloc.get_traced_memory()[1] < 66 << 20
    tracemalloc.stop()


def test_the_largest_messages_fit_and_larger_ones_are_refused() -> None:
    most = reserved(tuple(range(PAGES_MAX)))
    assert SEAL.opened(SEAL.sealed(most, sender=1, receiver=2)).message == most
    with pytest.raises(BadInput, match=f"{PAGES_MAX + 1} pages, at most {PAGES_MAX}"):
        SEAL.sealed(reserved((0,) * (PAGES_MAX + 1)), sender=1, receiver=2)
    with pytest.raises(BadInput, match="a text digest of 15 bytes"):
        SEAL.sealed(Reserved(1, 7, 1, bytes(15), 0, 1, 0, ()), sender=1, receiver=2)
    long = Hello(bytes(32), 64, bytes(16), bytes(16), bytes(ADDRESS_BYTES_MAX + 1))
    with pytest.raises(BadInput, match="address"):
        SEAL.sealed(long, sender=1, receiver=2)
    with pytest.raises(BadInput, match="does not fit"):
        SEAL.sealed(Heartbeat(2**64), sender=1, receiver=2)


def test_a_secret_has_a_length() -> None:
    with pytest.raises(BadInput, match="has 5 bytes, needs 16"):
        Seal(b"short")


@given(st.binary(min_size=1, max_size=5_000), st.data())
@settings(max_examples=200)
def test_a_checksum_finds_every_flip_of_neighbouring_bits(content: bytes, draws: st.DataObject):
    at = draws.draw(st.integers(0, 8 * len(content) - 1))
    burst = draws.draw(st.integers(0, 2**31 - 1)) * 2 + 1
    value = int.from_bytes(content, "little") ^ (burst << at) % (1 << 8 * len(content))
    changed = value.to_bytes(len(content), "little")
    cut = draws.draw(st.integers(0, len(content)))
    assert checksum([content[:cut], content[cut:]]) == checksum([content])
    assert checksum([changed]) != checksum([content])


def test_texts_and_salts_that_differ_have_other_digests() -> None:
    texts = [([], b""), ([1, 2], b""), ([2, 1], b""), ([1], b""), ([1, 2**40], b"")]
    salted = [([1, 2], b"a"), ([1, 2], b"a\0"), ([2], (1).to_bytes(8, "little"))]
    digests = {text_digest(tokens, salt) for tokens, salt in texts + salted}
    assert len(digests) == len(texts + salted)
    assert {len(digest) for digest in digests} == {16}
    assert text_digest([1, 2], b"a") == text_digest((1, 2), b"a")


def test_both_workers_make_one_number_of_a_routers_id() -> None:
    assert uid_of("xfer-1") == uid_of("xfer-1") == 0x23A3D893F365CA03
    named = {uid_of(text, place) for text in ("a", "b", "1 a", "\ud800") for place in range(64)}
    assert len(named) == 4 * 64
    assert all(0 <= uid <= UID_MAX for uid in named)
    for wrong in ("", "x" * 257, 5, None):
        with pytest.raises(BadInput, match=r"transfer_id must be a text of 1 to 256 characters"):
            uid_of(wrong)


def test_layouts_of_rows_that_differ_have_other_hashes() -> None:
    layout = ModelLayout.embedded()
    others = [
        replace(layout, row=RowCodec(form="bf16")),
        replace(layout, index=None),
        replace(layout, top_k=255),
        ModelLayout.embedded(mtp=False),
        ModelLayout.glm_5(),
    ]
    hashes = {layout_hash(layout), layout_hash(layout, weights="b"), *map(layout_hash, others)}
    assert len(hashes) == 7
    assert layout_hash(replace(layout, name="renamed")) == layout_hash(layout)
