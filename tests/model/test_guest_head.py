"""The head of a GGUF file that lies: one typed error, and no memory for what is not there."""

from __future__ import annotations

import re
import struct
import tracemalloc
from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.models.guest.head import check_head
from ess.models.guest.packed import Packed

pytest.importorskip("gguf", reason="extra `guest` (gguf) is not installed")

BYTES_MAX = 1 << 20
U8, U32, TEXT, LIST, U64 = 0, 4, 8, 9, 10
F32 = 0


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def listed(kind: int, count: int, held: bytes = b"") -> bytes:
    return entry(b"some.list", LIST, struct.pack("<IQ", kind, count) + held)


def number(key: bytes, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def tensor(
    name: bytes = b"a", sides: tuple[int, ...] = (2,), kind: int = F32, at: int = 0
) -> bytes:
    head = text(name) + struct.pack(f"<I{len(sides)}Q", len(sides), *sides)
    return head + struct.pack("<IQ", kind, at)


def file(
    *entries: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None
) -> bytes:
    """With 64 bytes of data behind its head."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, *(counts or (len(tensors), len(entries))))
    body = head + b"".join((*entries, *tensors))
    return body + bytes(-len(body) % 32 + 64)


LIES = {
    "another kind of file": (b"\x7fELF" + bytes(60), "begins with b'\\x7fELF'"),
    "a version to come": (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
    "the other byte order": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version 50331648"),
    "no byte": (b"", "not a whole GGUF file"),
    "entries without end": (file(counts=(0, 1 << 40)), "announces 1,099,511,627,776 entries"),
    "tensors without end": (file(counts=(1 << 63, 0)), "announces 9,223,372,036,854,775,808 tens"),
    "a list without end": (file(listed(U8, 1 << 60)), "announces 1,152,921,504,606,846,976 listed"),
    "lists that add up": (file(*[listed(U8, 1 << 19, bytes(1 << 19))] * 3), "at most 0"),
    "a list beyond the file": (file(listed(U64, 1 << 20)), "ends early: 8,388,608 bytes"),
    "texts beyond the file": (file(listed(TEXT, 1 << 20)), "ends early"),
    "a list of lists": (file(listed(LIST, 1)), "a value of kind 9"),
    "a text beyond the file": (file(struct.pack("<Q", 1 << 62)), "ends early: 4,611,686,018,427,"),
    "no such kind": (file(entry(b"key", 13, b"")), "a value of kind 13"),
    "the same key twice": (file(number(b"key", 1), number(b"key", 2)), "Duplicate key"),
    "a key in no alphabet": (file(number(b"\xff\xfe", 1)), "can't decode byte 0xff"),
    "an odd alignment": (file(number(b"general.alignment", 3)), "Invalid alignment"),
    "data behind the file": (file(tensors=(tensor(at=1 << 40),)), "cannot reshape array of size 0"),
    "data that ends early": (
        file(tensors=(tensor(sides=(17,)),)),
        "cannot reshape array of size 16",
    ),
    "sides without number": (file(tensors=(tensor(sides=(1,) * 9),)), "a tensor of 9 sides"),
    "sides beyond counting": (file(tensors=(tensor(sides=(1 << 40,) * 4),)), "not a whole GGUF"),
    "no such numbers": (file(tensors=(tensor(kind=99),)), "is not a valid GGML"),
    "the same tensor twice": (file(tensors=(tensor(), tensor())), "duplicated tensor"),
}


@pytest.fixture
def opened(tmp_path: Path):
    def open_it(content: bytes) -> Packed:
        path = tmp_path / "some.gguf"
        path.write_bytes(content)
        return Packed(path)

    return open_it


def test_a_true_head_passes(opened) -> None:
    said = entry(b"name", TEXT, text(b"it")), listed(U8, 3, b"\1\2\3"), number(b"one", 1)
    packed = opened(file(*said, tensors=(tensor(), tensor(b"b", (2, 3), at=32))))
    assert packed.names == {"a", "b"}
    assert packed.text("name") == "it"
    assert packed.listed("some.list", int) == [1, 2, 3]
    assert packed.floats("b", (3, 2)).shape == (3, 2)


@pytest.mark.parametrize("what", LIES)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_lie_is_one_typed_error_and_takes_no_memory(opened, what: str) -> None:
    content, sentence = LIES[what]
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=re.escape(sentence)) as caught:
            opened(content)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("some.gguf ")
    assert most < BYTES_MAX


def test_a_head_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    said = entry(b"name", TEXT, text(b"it")), listed(TEXT, 2, text(b"a") + text(b"b"))
    whole = file(*said, tensors=(tensor(sides=(2, 3)),))
    end = len(whole.rstrip(b"\0")) - 1
    path = tmp_path / "some.gguf"
    for length in range(1, end):
        path.write_bytes(whole[:length])
        with pytest.raises(BadInput, match=r"some\.gguf (ends early|begins with)"):
            check_head(path)
