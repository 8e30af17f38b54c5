"""The end of a step on a device, for all layer groups in one launch: csrc/residency/seal.cu."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from ess.kernels.cuda.driver import Device
from ess.pool.lru.cuda_records import address
from ess.pool.lru.cuda_shape import PHASE_THREADS, slot_program
from ess.units import PAGE_ROWS, div_ceil

SEAL: Final = "seal.cu"
_POINTERS: Final = (
    *("slot_of", "row_of", "rank_of", "dirty", "lengths", "host_page_of"),
    *("accepted", "lines", "sequence_of", "offsets", "rows", "new_slots"),
    *("first_layer", "key_pages", "kept", "sources", "targets", "told", "keys"),
    *("selects", "writes", "selected", "written", "left", "stored"),
)
_SIZES: Final = (
    *("row_id_count", "slot_stride", "host_row_count", "layers_each"),
    *("page_count", "key_words", "value_words"),
    *("group_total", "select_count", "number_stride"),
    *("count", "sequence_count", "tiles"),
    *("group_first", "group_stop", "stored_first", "stored_stop"),
)


class SealRecord(ctypes.Structure):
    """Seal of csrc/residency/seal.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
    )

    def give(self, **values: Any) -> SealRecord:
        """Sets fields: arrays by address, sizes as they are."""
        for name, value in values.items():
            assert name in _POINTERS or name in _SIZES, f"a seal has no {name}"
            setattr(self, name, address(value) if name in _POINTERS else value)
        return self

    def give_step(self, *, count: int, sequence_count: int, groups: range, stored: range) -> int:
        """Describes a step of `count` new rows with slots in these neighbouring `groups`; accepted
        rows of the groups `stored` are kept. Returns the blocks that the launch takes."""
        assert not stored or (stored.start in groups and stored[-1] in groups), (
            f"{stored}, {groups}"
        )
        tiles = max(1, div_ceil(count, PAGE_ROWS))
        self.give(count=count, sequence_count=sequence_count, tiles=tiles)
        self.give(group_first=groups.start, group_stop=groups.stop)
        self.give(stored_first=stored.start, stored_stop=stored.stop)
        return max(1, tiles * len(groups))


class SealKernel:
    """The loaded kernel. `fixed` holds the values of all steps; its arrays are kept alive."""

    def __init__(self, device: Device, **fixed: Any) -> None:
        self._fixed = fixed
        self._record = SealRecord().give(**fixed)
        self._kernel = device.kernel(slot_program(SEAL, PHASE_THREADS), "ess_seal")

    def queue(
        self,
        stream: int,
        *,
        count: int,
        sequence_count: int,
        groups: range,
        stored: range,
        **arrays: Any,
    ) -> None:
        blocks = self._record.give(**arrays).give_step(
            count=count, sequence_count=sequence_count, groups=groups, stored=stored
        )
        self._kernel.launch(self._record, blocks=blocks, threads=PHASE_THREADS, stream=stream)
