"""Index keys in pages: the block-split form that the kernels read.

A page of a layer is the values of 64 keys, then their 64 scales: not 64 records. To move a page
takes one copy; to move a key takes two. The same class serves both tiers: the latent pool holds the
truth by host page, the index pool holds active pages on the device.

Where neighbouring rows share a key (`IndexCodec.unit`), a page has 64 / unit values and scales. The
key of a unit is that of its last row: callers read and write keys row by row, and what they write
for other rows of a unit is dropped.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ess.array_types import Bytes, PageIds, RowIds
from ess.kernels.cpu import native
from ess.layout import ModelLayout
from ess.units import PAGE_ROWS


class KeyPages:
    def __init__(self, layout: ModelLayout, memory: Bytes, page_count: int) -> None:
        codec = layout.index
        page_bytes = codec.page_bytes if codec is not None else 0
        value_bytes = codec.value_bytes if codec is not None else 0
        shape = (layout.key_layer_count, page_count, page_bytes)
        assert len(memory) >= np.prod(shape), f"{len(memory)} bytes for pages of shape {shape}"
        self.pages: Bytes = memory[: int(np.prod(shape))].reshape(shape)
        self.value_bytes = value_bytes
        self.unit = codec.unit if codec is not None else 1
        per_page = PAGE_ROWS // self.unit
        split = per_page * value_bytes
        self._values = _by_key(self.pages[:, :, :split], per_page)
        self._scales = _by_key(self.pages[:, :, split:], per_page)
        self._base = native.address(self.pages)

    @property
    def layer_count(self) -> int:
        return len(self.pages)

    @property
    def key_bytes(self) -> int:
        return int(self._values.shape[3] + self._scales.shape[3])

    def write(self, layers: int | Sequence[int], rows: RowIds, keys: Bytes) -> None:
        """Writes `keys` [n, key_bytes], each the values of a key, then its scale; of several layers
        [layers, n, key_bytes]."""
        layer = np.asarray(layers)[..., None]
        shape = (*layer.shape[:-1], len(rows), self.key_bytes)
        assert keys.shape == shape, f"keys {keys.shape} for {shape}"
        last = self._are_last(rows)
        page, offset = self._places(rows[last])
        self._values[layer, page, offset] = keys[..., last, : self.value_bytes]
        self._scales[layer, page, offset] = keys[..., last, self.value_bytes :]

    def _are_last(self, rows: RowIds) -> npt.NDArray[np.bool_]:
        """Whether each row is the last of its unit."""
        last: npt.NDArray[np.bool_] = rows % self.unit == self.unit - 1
        return last

    def _places(self, rows: RowIds) -> tuple[RowIds, RowIds]:
        """The page of each row, and which of its keys is the row's."""
        return rows // PAGE_ROWS, rows % PAGE_ROWS // self.unit

    def side(self, layer: int) -> tuple[int, int, int, int]:
        """For native code: address, page count, bytes of a key's value part and of its scale."""
        assert 0 <= layer < self.layer_count, f"layer {layer} of {self.layer_count}"
        at = self._base + layer * self.pages.strides[0]
        return at, self.pages.shape[1], self.value_bytes, self._scales.shape[3]

    def read(self, layer: int, rows: RowIds) -> Bytes:
        assert 0 <= layer < self.layer_count, f"layer {layer} of {self.layer_count}"
        page, offset = self._places(rows)
        parts = (self._values[layer, page, offset], self._scales[layer, page, offset])
        return np.concatenate(parts, axis=1)

    def copy_keys(
        self, source: KeyPages, source_rows: RowIds, rows: RowIds, *, layers: Sequence[int]
    ) -> None:
        """Copies keys of these layers from another tier, key by key."""
        assert len(source_rows) == len(rows), f"{len(source_rows)} keys to {len(rows)} rows"
        assert self.key_bytes == source.key_bytes, f"keys of {source.key_bytes} bytes"
        assert ((source_rows - rows) % self.unit == 0).all(), "rows of other places in their units"
        if native.available():
            return self._copy_native(source, source_rows, rows, np.array(layers, np.int32))
        layer, last = np.asarray(layers)[:, None], self._are_last(rows)
        page, offset = self._places(rows[last])
        source_page, source_offset = self._places(source_rows[last])
        self._values[layer, page, offset] = source._values[layer, source_page, source_offset]
        self._scales[layer, page, offset] = source._scales[layer, source_page, source_offset]

    def _copy_native(
        self, source: KeyPages, source_rows: RowIds, rows: RowIds, layers: RowIds
    ) -> None:
        lists = (source_rows, rows, layers)
        assert all(native.contiguous(ids, np.int32) for ids in lists), "ids are dense int32"
        at = tuple(map(native.address, lists))
        done = _copy()(struct.pack("13q", *self.copying(source, at, (len(rows), len(layers)))))
        assert done, f"a key outside of {source.pages.shape} or {self.pages.shape}"

    def copying(
        self, source: KeyPages, lists: tuple[int, ...], counts: tuple[int, int]
    ) -> tuple[int, ...]:
        """A `KeyCopy` of csrc/cpu/keys.cpp; `lists`: addresses of source rows, rows, layers."""
        assert self.value_bytes == source.value_bytes, f"values of {source.value_bytes} bytes"
        assert self.unit == source.unit, f"keys of {source.unit} rows"
        sides = (source._base, source.pages.shape[1], self._base, self.pages.shape[1])
        layer_max = min(self.layer_count, source.layer_count)
        sizes = self.value_bytes, self._scales.shape[3], self.unit
        return (*sides, *lists, *counts, layer_max, *sizes)

    def copy_pages(self, source: KeyPages, source_pages: PageIds, pages: PageIds) -> None:
        assert len(source_pages) == len(pages), f"{len(source_pages)} pages to {len(pages)}"
        assert self.layer_count == source.layer_count, f"keys of {source.layer_count} layers"
        for layer in range(self.layer_count):
            self.pages[layer, pages] = source.pages[layer, source_pages]

    def copy_page(self, source: int, target: int) -> None:
        assert source != target, f"page {source} onto itself"
        self.pages[:, target] = self.pages[:, source]

    def fill(self, pages: PageIds, value: int) -> None:
        self.pages[:, pages] = value


def _by_key(part: Bytes, count: int) -> Bytes:
    """[layers, pages, count * n] seen as [layers, pages, count, n] without copying."""
    layers, pages, width = part.shape
    assert width % count == 0, f"{width} bytes are not {count} equal parts"
    each = width // count
    strides = (*part.strides[:2], each, 1)
    shape = (layers, pages, count, each)
    return np.lib.stride_tricks.as_strided(part, shape, strides)


@functools.cache
def _copy() -> Callable[[bytes], int]:
    """The native function; it takes a packed `KeyCopy` of csrc/cpu/keys.cpp."""
    return native.function("ess_keys_copy", [ctypes.c_char_p], ctypes.c_int32)
