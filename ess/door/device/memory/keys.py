"""Index keys of active pages on the device, in the form of `ess.pool.keys`.

Loads from the host's pages go through the copy lane, so that a resumed request's keys, a gigabyte
at 128K, do not pass through the compute stream; it waits for them where a step begins, or a prompt
writes its keys.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.array_types import PageIds
from ess.door.device.memory.lane import DeviceLane
from ess.door.device.memory.uploads import upload
from ess.kernels.streams import RowCopy
from ess.layout import ModelLayout
from ess.pool.latent import LatentPool
from ess.units import PAGE_ROWS

WORD: Final = 4


class KeyPlaces(NamedTuple):
    """Where keys lie in a layer's pages: the values of a key as `pieces` pieces of equal size, its
    scale as one word."""

    values: Tensor
    scales: Tensor
    pieces: int


class DeviceKeys:
    def __init__(
        self, layout: ModelLayout, page_count: int, lane: DeviceLane, *, poison: bool
    ) -> None:
        codec = layout.index
        self.page_count = page_count
        self.key_bytes = 0 if codec is None else codec.key_bytes
        self._value_bytes = 0 if codec is None else codec.value_bytes
        self._lane = lane
        self._page_bytes = PAGE_ROWS * self.key_bytes
        self._unit = math.gcd(self._value_bytes, self._page_bytes)
        shape = (layout.key_layer_count, page_count, self._page_bytes)
        self.pages = torch.full(shape, 0xFF if poison else 0, dtype=torch.uint8, device=lane.home)
        self._split = PAGE_ROWS * self._value_bytes
        self._values = _by_key(self.pages[..., : self._split])
        self._scales = _by_key(self.pages[..., self._split :])

    @property
    def layer_count(self) -> int:
        return int(self.pages.shape[0])

    def places(self, rows: Tensor) -> KeyPlaces:
        """Where keys of these row ids lie in their layers' pages; -1 for a row of no page. Numbers
        are of 32 bits, and a page's first byte may have a number that needs more."""
        page, offset = torch.div(rows, PAGE_ROWS, rounding_mode="floor"), rows % PAGE_ROWS
        pieces = self._value_bytes // self._unit if self.key_bytes else 0
        steps = torch.arange(pieces, dtype=torch.int32, device=rows.device)
        first = page * (self._page_bytes // max(1, self._unit)) + offset * pieces
        values = torch.where(rows < 0, -1, first).unsqueeze(1) + steps * (rows >= 0).unsqueeze(1)
        scales = page * (self._page_bytes // WORD) + self._split // WORD + offset
        return KeyPlaces(values.reshape(-1), torch.where(rows < 0, -1, scales), pieces)

    def write(self, layer: int, places: KeyPlaces, keys: Tensor, *, first: int = 0) -> None:
        """`keys` [n, key_bytes] of the device, to the places from the first-th on."""
        lane, pages, size = self._lane, self.pages[layer], len(keys) * places.pieces
        lane.hold_for_keys()
        begin = first * places.pieces
        values = keys[:, : self._value_bytes].reshape(size, self._unit)
        copies = [
            RowCopy(
                source=values,
                target=pages.view(-1, self._unit),
                target_rows=places.values[begin : begin + size],
            )
        ]
        if self.key_bytes > self._value_bytes:
            copies.append(
                RowCopy(
                    source=keys[:, self._value_bytes :],
                    target=pages.view(-1, WORD),
                    target_rows=places.scales[first : first + len(keys)],
                )
            )
        lane.mover.queue(copies, lane.compute)

    def read(self, rows: Tensor) -> Tensor:
        """[layers, n, key_bytes], of the device."""
        page = torch.div(rows, PAGE_ROWS, rounding_mode="floor").long()
        offset = (rows % PAGE_ROWS).long()
        return torch.cat((self._values[:, page, offset], self._scales[:, page, offset]), dim=2)

    def upload(self, layer: int, rows: PageIds, keys: npt.NDArray[np.uint8] | Tensor) -> None:
        """Writes keys to their places; keys on the host are uploaded first."""
        home = self._lane.home
        on_device = keys if isinstance(keys, Tensor) else upload(keys, home)
        self.write(layer, self.places(upload(rows, home)), on_device)

    def load(self, host_pages: PageIds, active: PageIds, latent: LatentPool) -> None:
        """Whole pages of the host."""
        chosen = latent.have_keys(host_pages)
        if not self.layer_count or not chosen.any():
            return
        sources, targets = (
            upload(pages[chosen], self._lane.home) for pages in (host_pages, active)
        )
        self._lane.keys_under_way = True
        self._lane.submit(
            [
                RowCopy(
                    source=torch.from_numpy(latent.keys.pages[layer]),
                    source_rows=sources,
                    target=self.pages[layer],
                    target_rows=targets,
                )
                for layer in range(self.layer_count)
            ]
        )

    def copy_page(self, source: int, target: int) -> None:
        assert source != target, f"page {source} onto itself"
        self._lane.hold_for_keys()
        self.pages[:, target] = self.pages[:, source]


def _by_key(part: Tensor) -> Tensor:
    """[layers, pages, 64 * n] seen as [layers, pages, 64, n]."""
    layers, pages, width = part.shape
    step = part.stride()
    return part.as_strided(
        (layers, pages, PAGE_ROWS, width // PAGE_ROWS),
        (step[0], step[1], width // PAGE_ROWS, 1),
        part.storage_offset(),
    )
