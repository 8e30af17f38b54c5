"""The header of a safetensors file, believed only as far as it can be proved.

The file: 8 bytes, little endian, the length of the header; the header, a JSON object from tensor
name to {dtype, shape, data_offsets}; then the bytes of the tensors. What is proved here:

- the length lies inside the file and under a fixed bound, before a byte of it is read;
- every name appears once; every dtype is known; shape, dtype and byte count agree;
- sorted by offset, the tensors tile the data exactly: no overlap, no hole, no byte outside.

Then any tensor of the header may be viewed without another check.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ess.errors import BadInput
from ess.models.weights.files.folder import read_at
from ess.models.weights.files.strict_json import parse_object

HEADER_BYTES_MAX: Final = 32 << 20
NAME_CHARS_MAX: Final = 512
_LFS: Final = b"version "
"""How a pointer of Git LFS begins: a text, and no number."""
_DIMS_MAX: Final = 8
_PREFIX_BYTES: Final = 8

DTYPE_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file; `begin` and `end` are offsets in the file."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"


def renamed(entries: Mapping[str, Entry], words: Sequence[tuple[str, str]]) -> dict[str, Entry]:
    """The entries under other names: `words` has pairs of whole parts of a name and their
    replacement."""
    by_name: dict[str, Entry] = {}
    for name, entry in entries.items():
        own = _renamed(name, words)
        if (other := by_name.setdefault(own, entry)) is not entry:
            raise BadInput(f"{entry} and {other} are both read as {own!r}")
    return by_name


def _renamed(name: str, words: Sequence[tuple[str, str]]) -> str:
    whole = f".{name}."
    for theirs, ours in words:
        whole = whole.replace(f".{theirs}.", f".{ours}.")
    return whole[1:-1]


def read_header(fd: int, *, file: str) -> dict[str, Entry]:
    """All tensors of an open safetensors file, in the order of their bytes."""
    file_bytes = os.fstat(fd).st_size
    data_begin = _PREFIX_BYTES + _header_bytes(fd, file=file, file_bytes=file_bytes)
    raw = read_at(fd, _PREFIX_BYTES, data_begin - _PREFIX_BYTES)
    fields = parse_object(raw, what=f"{file}: the header")
    fields.pop("__metadata__", None)
    entries = sorted(
        (_entry(file, name, value, data_begin) for name, value in fields.items()),
        key=lambda entry: (entry.begin, entry.end),
    )
    _check_tiling(entries, file=file, data_begin=data_begin, file_bytes=file_bytes)
    return {entry.name: entry for entry in entries}


def _header_bytes(fd: int, *, file: str, file_bytes: int) -> int:
    if file_bytes < _PREFIX_BYTES + 2:
        raise BadInput(f"{file} has {file_bytes} bytes, too few for a safetensors file")
    count = int.from_bytes(read_at(fd, 0, _PREFIX_BYTES), "little")
    room = file_bytes - _PREFIX_BYTES
    if read_at(fd, 0, _PREFIX_BYTES) == _LFS:
        raise BadInput(
            f"{file} is a pointer of Git LFS, not the file: fetch it with `git lfs pull`"
        )
    if count > room:
        raise BadInput(f"{file} claims a header of {count:,} bytes, but only {room:,} follow")
    if count > HEADER_BYTES_MAX:
        raise BadInput(f"{file} has a header of {count:,} bytes; the bound is {HEADER_BYTES_MAX:,}")
    return count


def _entry(file: str, name: str, value: Any, data_begin: int) -> Entry:
    what = f"{file}: tensor {name[:NAME_CHARS_MAX]!r}"
    if len(name) > NAME_CHARS_MAX:
        raise BadInput(f"{what}... has a name of {len(name):,} characters")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"{what} is not described by dtype, shape and data_offsets")
    shape = _whole_numbers(value["shape"], what=f"{what}: shape")
    offsets = _whole_numbers(value["data_offsets"], what=f"{what}: data_offsets")
    if len(shape) > _DIMS_MAX or len(offsets) != 2:
        raise BadInput(f"{what} has {len(shape)} dimensions and {len(offsets)} offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadInput(f"{what} has the unknown dtype {str(dtype)[:40]!r}")
    begin, end = offsets
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise BadInput(
            f"{what} is {dtype} {list(shape)} and needs {needed:,} bytes,"
            f" but its offsets [{begin}, {end}] hold {end - begin:,}"
        )
    return Entry(
        file=file,
        name=name,
        dtype=dtype,
        shape=shape,
        begin=data_begin + begin,
        end=data_begin + end,
    )


def _whole_numbers(value: Any, *, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadInput(f"{what} is not a list")
    if not all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        raise BadInput(f"{what} holds something that is not a whole number: {str(value)[:80]}")
    return tuple(value)


def _check_tiling(entries: Sequence[Entry], *, file: str, data_begin: int, file_bytes: int) -> None:
    at = data_begin
    for entry in entries:
        if entry.begin < at:
            raise BadInput(f"{entry} overlaps the tensor before it by {at - entry.begin:,} bytes")
        if entry.begin > at:
            raise BadInput(f"{entry} begins {entry.begin - at:,} bytes after the tensor before it")
        if entry.end > file_bytes:
            described = max(entry.end for entry in entries)
            raise BadInput(
                f"{file} is cut short: it has {file_bytes:,} bytes, its header describes"
                f" {described:,}; fetch it again"
            )
        at = entry.end
    if at != file_bytes:
        raise BadInput(f"{file} holds {file_bytes - at:,} bytes that belong to no tensor")
