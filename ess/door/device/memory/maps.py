"""The maps of the host that kernels read too: page tables, lengths, the host pages of active pages.

The host owns these maps and decides by them. Its changes reach the device at the next `flush`, in
one upload that is queued behind all earlier work, so kernels of earlier steps still read the old
values. Lengths differ: once uploaded they belong to the device, where each step adds the tokens
that it accepts before the host has read them. The host writes the length of a line only while no
step under way has that line.
"""

from __future__ import annotations

import numpy as np
import torch

from ess.array_types import PageIds
from ess.door.device.memory.keys import DeviceKeys
from ess.door.device.memory.uploads import upload
from ess.pool.index import NONE, ActivePages, PageTables
from ess.pool.latent import LatentPool
from ess.units import PAGE_ROWS


class Maps:
    """`lines` [line, page], `lengths` [line] and `host_page_of` [active page], on the device."""

    def __init__(
        self, home: torch.device, *, line_count: int, page_max: int, page_count: int
    ) -> None:
        sizes = (line_count * page_max, line_count, page_count)
        self._home = home
        self._all = torch.full((sum(sizes),), NONE, dtype=torch.int32, device=home)
        lines, self.lengths, self.host_page_of = torch.split(self._all, list(sizes))
        self.lines = lines.view(line_count, page_max)
        self._firsts = (0, sizes[0], sizes[0] + sizes[1])
        self._changed: dict[int, int] = {}

    def set_pages(self, line: int, first: int, active: PageIds) -> None:
        begin = line * self.lines.shape[1] + first
        self._changed.update(zip(range(begin, begin + len(active)), active.tolist(), strict=True))

    def set_length(self, line: int, length: int) -> None:
        self._changed[self._firsts[1] + line] = length

    def set_host_pages(self, active: PageIds, host_pages: PageIds) -> None:
        begin = self._firsts[2]
        for page, host_page in zip(active.tolist(), host_pages.tolist(), strict=True):
            self._changed[begin + page] = host_page

    def flush(self) -> None:
        """Queues the upload of entries that the host has changed."""
        if not self._changed:
            return
        pairs = np.array([list(self._changed.keys()), list(self._changed.values())], np.int32)
        on_device = upload(pairs, self._home)
        self._all.index_copy_(0, on_device[0].long(), on_device[1])
        self._changed.clear()

    def rows_of_line(self, line: int, page_count: int) -> torch.Tensor:
        """Row ids of all positions of a line's first pages."""
        pages = self.lines[line, :page_count].repeat_interleave(PAGE_ROWS)
        rows: torch.Tensor = pages * PAGE_ROWS + self.places_of_line(page_count) % PAGE_ROWS
        return rows

    def places_of_line(self, page_count: int) -> torch.Tensor:
        """0, 1, ..., for all positions of `page_count` pages."""
        count = page_count * PAGE_ROWS
        return torch.arange(count, dtype=torch.int32, device=self._home)


class DeviceTables(PageTables):
    """Page tables whose changes go to the device. `lengths` are what the host has learned.

    `left_count` of a line grows when a sequence leaves it: its rows may then leave their slots."""

    def __init__(self, maps: Maps) -> None:
        super().__init__(sequence_max=maps.lines.shape[0], page_max=maps.lines.shape[1])
        self.maps = maps
        self.left_count = [0] * len(self.lines)

    def extend(self, line: int, first: int, active: PageIds) -> None:
        self.maps.set_pages(line, first, active)
        super().extend(line, first, active)

    def set_length(self, line: int, length: int) -> None:
        super().set_length(line, length)
        self.maps.set_length(line, length)

    def learn(self, lines: list[int], counts: list[int]) -> None:
        """Adds counts to the host's lengths, as the device has done to its own."""
        self.lengths[lines] += np.array(counts, np.int32)

    def give_back(self, line: int) -> None:
        count = int((self.lines[line] != NONE).sum())
        super().give_back(line)
        self.left_count[line] += 1
        self.maps.set_pages(line, 0, np.full(count, NONE, np.int32))
        self.maps.set_length(line, NONE)


class DeviceIndex(ActivePages):
    """Active pages whose keys lie on the device."""

    def __init__(self, keys: DeviceKeys, maps: Maps, *, host_page_count: int) -> None:
        super().__init__(page_count=keys.page_count, host_page_count=host_page_count)
        self.keys = keys
        self._maps = maps

    def _load(self, host_pages: PageIds, active: PageIds, latent: LatentPool) -> None:
        self._maps.set_host_pages(active, host_pages)
        self.keys.load(host_pages, active, latent)

    def free(self, leaving: PageIds) -> None:
        super().free(leaving)
        self._maps.set_host_pages(leaving, np.full(len(leaving), NONE, np.int32))

    def write_keys(
        self, layer: int, rows: PageIds, keys: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    ) -> None:
        self.keys.upload(layer, rows, keys)

    def copy_page(self, source: int, target: int) -> None:
        self.keys.copy_page(source, target)

    def check(self) -> None:
        super().check()
        self._maps.flush()
        on_device = self._maps.host_page_of.cpu().numpy()
        assert (on_device == self.host_page_of).all(), "the device has other host pages"


def rows_of(maps: Maps, lines: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Row ids of positions that each lie in a line of its own; all on the device."""
    places = lines * maps.lines.shape[1] + torch.div(positions, PAGE_ROWS, rounding_mode="floor")
    pages = maps.lines.view(-1).index_select(0, places)
    rows: torch.Tensor = pages * PAGE_ROWS + positions % PAGE_ROWS
    return rows
