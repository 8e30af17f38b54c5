"""The end of a step in one native call: its kept rows go home and are stored and clean, the others
leave; what a store, `settle`, the marks and `drop` do, without a lane.

What the call takes is mostly the same in every step, and kept.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.array_types import Ints
from ess.door.memory.pools import HostPools
from ess.door.steps.step import Step
from ess.kernels.cpu import native

Words = npt.NDArray[np.int64]


class Sealing:
    def __init__(self, pools: HostPools) -> None:
        self._pools = pools
        self._told: Any = None
        self._bytes = 0
        self._sealed: Words = np.empty((0, 7), np.int64)
        self._numbers: Ints = np.empty(0, np.int32)
        self._left: Words = np.empty(0, np.int64)

    def at_once(self, step: Step, groups: list[int], accepted: list[int], lines: Ints) -> bool:
        """Whether that was done, for new rows in the slots that `lines` names by group. False where
        many rows are kept, or none."""
        pools, count = self._pools, sum(accepted)
        if not pools.at_once_bytes or not groups:
            return False
        arguments = groups, pools.sparse.addresses(groups), sorted(step.keyed)
        if arguments != self._told:
            self._told = arguments
            self._tell(*arguments, lines)
        if not 0 < count * self._bytes <= pools.at_once_bytes:
            return False
        self._seal(step, accepted)
        if count < step.row_count:
            assert (self._left == step.row_count - count).all(), f"{step!r}: {self._left} rows left"
            pools.sparse.left(groups, self._left.tolist())
        pools.latent.change()
        return True

    def _tell(self, groups: list[int], arenas: list[int], keyed: list[int], lines: Ints) -> None:
        layout, sealed = self._pools.layout, []
        numbers = [layout.key_layer_of(group) for group in groups]
        for group, arena, number in zip(groups, arenas, numbers, strict=True):
            first, count = layout.groups[group][0], len(layout.groups[group])
            host = self._pools.host_layers[first]
            of_group = arena, native.address(lines[group]), first, count, number in keyed
            sealed.append((*of_group, host.address, host.row_bytes))
        self._sealed = np.array(sealed, np.int64)
        self._numbers = np.array([-1 if number is None else number for number in numbers], np.int32)
        self._left = np.zeros(len(groups), np.int64)
        self._bytes = int((self._sealed[:, 3] * self._sealed[:, 6]).sum())

    def _seal(self, step: Step, accepted: list[int]) -> None:
        index, latent, at = self._pools.index, self._pools.latent, native.address
        counts = struct.pack(f"{2 * len(accepted)}i", *step.row_counts, *accepted)
        lists = (at(step.row_ids), 0, at(self._numbers))
        keys = latent.keys.copying(index.keys, lists, (step.row_count, len(self._numbers)))
        memory = (self._pools.slabs[0][0].address, at(latent.stored), at(latent.keyed))
        of_step = (at(index.host_page_of), at(self._sealed), at(self._left), len(self._numbers))
        packed = struct.pack("21q", *keys, *memory, *of_step, latent.writes)
        done = _seal()(packed, counts, len(accepted))
        assert done, f"step {step.number}: a slot that does not hold its new row"


@functools.cache
def _seal() -> Callable[[bytes, bytes, int], int]:
    """Takes a `Seal` of csrc/cpu/keys.cpp, packed, and how many rows each sequence brought and
    keeps."""
    types = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
    return native.function("ess_seal", types, ctypes.c_int32)
