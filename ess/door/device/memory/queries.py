"""What a step knows of each of its queries, on a device.

The host knows all of it but the length of each sequence, which the device counts itself. So a step
begins with one upload, of lines and places, and a few small kernels. The arrays are the first
entries of memory at fixed addresses, so that a graph over them can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ess.door.checks import kept_counts
from ess.door.device.memory.keys import DeviceKeys, KeyPlaces
from ess.door.device.memory.maps import DeviceTables, rows_of
from ess.door.device.memory.uploads import given, upload, upload_into
from ess.door.steps.arrays import Kept, places, require_same
from ess.errors import BadInput
from ess.pool.device_bytes import QUERY_NUMBERS

LINE, OFFSET, SEQUENCE, START, STOP, ROW = range(QUERY_NUMBERS)
NO_ROW = -1


class Sealed(Protocol):
    """What a step's seal has queued, until the host has learned."""

    def learned(self, kept: list[int]) -> None: ...


class Queries:
    """The memory of the arrays of all steps, one after the other."""

    def __init__(self, tables: DeviceTables, keys: DeviceKeys, query_max: int) -> None:
        self.tables = tables
        self.keys = keys
        self.home = tables.maps.lines.device
        self.memory = torch.full(
            (QUERY_NUMBERS, query_max), NO_ROW, dtype=torch.int32, device=self.home
        )

    @property
    def new_rows(self) -> Tensor:
        """[1, query_max]: the row ids of the latest step's new rows, and -1 behind them."""
        return self.memory[ROW : ROW + 1]

    def begin(self, lines: list[int], query_counts: Many[int], room: int) -> DeviceArrays:
        """Pads follow the queries, up to `room`. A pad has no position and no row, and the line of
        some sequence with pages."""
        self.tables.maps.flush()
        sequence_of, offset = places(query_counts)
        count, mine = len(offset), self.memory[:, :room]
        known = np.zeros((START, room), np.int32)
        known[LINE] = lines[0]
        known[:, :count] = np.array(lines, np.int32)[sequence_of], offset, sequence_of
        upload_into(mine[:START], known)
        maps = self.tables.maps
        mine[START] = maps.lengths.index_select(0, mine[LINE])
        positions = mine[START] + mine[OFFSET]
        mine[STOP] = positions + 1
        mine[ROW] = rows_of(maps, mine[LINE], positions)
        mine[START : STOP + 1, count:] = 0
        self.memory[ROW, count:] = NO_ROW
        return DeviceArrays(self, lines, room, count)


class DeviceArrays:
    """`new_count` of the queries bring rows, the others are pads."""

    def __init__(self, queries: Queries, lines: list[int], room: int, new_count: int) -> None:
        self.new_count = new_count
        self._keys = queries.keys
        self._key_places: KeyPlaces | None = None
        self._tables = queries.tables
        self._home = queries.home
        self._lines = lines
        self.lines = upload(np.array(lines, np.int32), self._home)
        self._known: list[int] | None = None
        self.seal: Sealed | None = None
        mine = queries.memory[:, :room]
        self.query_line, self.query_offset, self.sequence_of = (
            mine[LINE],
            mine[OFFSET],
            mine[SEQUENCE],
        )
        self.query_start, self.query_stop, self.row_ids = mine[START], mine[STOP], mine[ROW]
        self.row_offset = self.query_offset

    @property
    def positions(self) -> Tensor:
        return self.query_start + self.query_offset

    def page_table(self) -> Tensor:
        table: Tensor = self._tables.maps.lines.index_select(0, self.query_line)
        return table

    def lengths(self, appended_count: int) -> Tensor:
        if appended_count == len(self.query_stop):
            return self.query_stop
        if appended_count == 0:
            return self.query_start
        return torch.cat((self.query_stop[:appended_count], self.query_start[appended_count:]))

    def key_places(self) -> KeyPlaces:
        """Where the index keys of the new rows go."""
        if self._key_places is None:
            self._key_places = self._keys.places(self.row_ids)
        return self._key_places

    def given(self, value: Any, name: str, dtype: str, shape: tuple[int | None, ...]) -> Tensor:
        return given(value, name, dtype, shape, self._home)

    def kept(self, accepted: Any, row_counts: Many[int]) -> Kept:
        """Numbers are checked; a tensor of the device is trusted until the host learns them."""
        if isinstance(accepted, Tensor) and accepted.device == self._home:
            return self.given(accepted, "accepted", "int32", (len(row_counts),))
        if isinstance(accepted, Tensor):
            raise BadInput(f"accepted is on {accepted.device}, must be on {self._home} or a list")
        return kept_counts(accepted, row_counts)

    def on_device(self, kept: Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return upload(np.array(kept, np.int32), self._home)

    def sealed(self, kept: Kept) -> None:
        self._known = kept if isinstance(kept, list) else None

    def learned(self, kept: list[int], *, number: int) -> None:
        if self._known is not None:
            require_same(kept, self._known, number=number)
        assert self.seal is not None, f"step {number} is learned and was not sealed"
        self.seal.learned(kept)
        self._tables.learn(self._lines, kept)
