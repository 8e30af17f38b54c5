"""Layers of a decode step in one native call: `ess_layers` of csrc/cpu/layer.cpp.

`Layers` is the array of records that the call takes. What stays is written once; what a step
changes is written by `column`, for neighbouring layers at once. `told` is what a placement has
written there last, so that it does not write it again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.kernels.cpu import native, records

Words = npt.NDArray[np.int64]

_WORD: Final = 8


class Find(IntEnum):
    """How selected rows are found: by their address, in slots, or in slots after a fetch."""

    ADDRESS = 0
    LOCATE = 1
    RESOLVE = 2


class Part(IntEnum):
    FRONT = 0
    SELECT = 1
    FIND = 2
    ASK = 3
    ATTEND = 4
    BACK = 5
    DONE = 6


class Stop(IntEnum):
    """Why a layer is not done: nothing, a row has no slot, a fetch is to be waited for, a fault."""

    NONE = 0
    ABSENT = 1
    FETCH = 2
    REFUSED = 3


class Layers:
    def __init__(self, count: int) -> None:
        assert ctypes.sizeof(records.Layer) % _WORD == 0, "a record is not made of words"
        assert int(Part.DONE) == records.PART_COUNT, "the record has times of other parts"
        self.records: Any = (records.Layer * count)()
        self._words = np.frombuffer(memoryview(self.records).cast("B"), np.int64).reshape(count, -1)
        self._columns: dict[str, Words] = {}
        self.told: dict[range, Any] = {}
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return len(self._words)

    def column(self, name: str, which: range) -> Words:
        """A field of these layers, or the words of a list in it; `append.slots` is within
        another record."""
        if name not in self._columns:
            at, size = 0, _WORD
            kind: Any = records.Layer
            for part in name.split("."):
                field = getattr(kind, part)
                at, size = at + field.offset, field.size
                kind = {entry[0]: entry[1] for entry in kind._fields_}[part]
            words = self._words[:, at // _WORD : (at + size) // _WORD]
            self._columns[name] = words[:, 0] if size == _WORD else words
        return self._columns[name][which.start : which.stop]

    def tell(self, which: range, what: Any) -> None:
        """What is written for these layers now; their earlier records no longer hold."""
        others = self.told.items()
        self.told = {r: t for r, t in others if r.stop <= which.start or which.stop <= r.start}
        self.told[which] = what

    def run(
        self, which: range, step: records.StepSide, *, threads: int, begins: bool = False
    ) -> int:
        """The first of these layers that is not done, or their end. `begins`: no call of this step
        was made for them."""
        first = ctypes.byref(self.records, which.start * ctypes.sizeof(records.Layer))
        done: int = _run()(first, step, len(which), threads, begins)
        return which.start + done


@functools.cache
def _run() -> Callable[..., int]:
    types = [ctypes.c_void_p, ctypes.POINTER(records.StepSide), ctypes.c_int64]
    return native.function("ess_layers", [*types, ctypes.c_int32, ctypes.c_int32], ctypes.c_int64)
