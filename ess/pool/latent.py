"""The latent pool: every row of every layer and a copy of every index key, on the host. The truth.

`rows[layer][host row]` where host row = host page * 64 + offset. A bit per row and layer says
whether it has been stored: `stored[layer, host page]`. That one mask answers four questions: may a
prefetch read this row, is an import a duplicate, how long is a sequence, and may a page be
published for reuse (all 64 bits in every layer, MTP and index keys included). Freed rows are filled
with 0xFF when `poison` is set: NaN in e4m3, bf16 and f32, so that a stale read shouts.

Processes may share the rows and keys (`Common`). Each process has its own marks, which are equal
because all processes make the same calls. One process writes; the others mark what it writes, and
their `say` returns when it has written.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ess.array_types import Bytes, PageIds, RowIds
from ess.kernels.cpu import native
from ess.layout import ModelLayout
from ess.pool.keys import KeyPages
from ess.pool.pages import PagePool
from ess.pool.prefix import PrefixIndex
from ess.units import PAGE_ROWS

Layers = int | Sequence[int]

POISON: Final = 0xFF
FULL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)


class CommonMemory(NamedTuple):
    """Rows [layer][host row] and index keys of some layers; bytes behind them are unused."""

    rows: Bytes
    keys: Bytes


class Common(Protocol):
    """Host memory that several processes share. They make the same calls in the same order."""

    @property
    def writes(self) -> bool:
        """Whether this process writes to the pool; only one process does."""

    def memory(self, page_count: int) -> CommonMemory: ...

    def written(self) -> None:
        """Returns when all writes before this call lie in memory."""


class LatentPool:
    """`fd` is the memory file that the pool lies in from its first byte on, if there is one: other
    processes can map it. `taken_digest` covers all pages taken so far, in order. `is_unsaid`
    between a change and the `say` behind it: until then no process reads what has changed."""

    def __init__(
        self,
        layout: ModelLayout,
        memory: Bytes | CommonMemory,
        *,
        fd: int | None = None,
        poison: bool = False,
        common: Common | None = None,
    ) -> None:
        rows, keys = memory if isinstance(memory, CommonMemory) else split(layout, memory)
        self.layers, self.keys, self.row_memory = laid_out(layout, rows, keys)
        page_count = len(self.layers[0]) // PAGE_ROWS
        self.layout = layout
        self.fd = fd
        self.pages = PagePool(page_count)
        self.prefix = PrefixIndex()
        self.taken_digest = 0
        self.is_unsaid = False
        self._common = common
        self._poison = poison and (common is None or common.writes)
        layers, key_layers = layout.layer_total, layout.key_layer_count
        self._marks = np.zeros((layers + key_layers, page_count), np.uint64)
        self.stored, self.keyed = self._marks[:layers], self._marks[layers:]
        if self._poison:
            for part in (self.row_memory, self.keys.pages):
                part.fill(POISON)

    @property
    def rows(self) -> Bytes:
        """Rows as [layer][host row]; all must be of one size."""
        assert not self.layout.rows, "rows of layers are of several sizes"
        return self.row_memory.reshape(len(self.layers), *self.layers[0].shape)

    @property
    def writes(self) -> bool:
        return self._common is None or self._common.writes

    @property
    def is_common(self) -> bool:
        return self._common is not None

    def change(self) -> None:
        """Notes that rows or keys were written, here or by the process that writes."""
        self.is_unsaid = self.is_common

    def say(self) -> None:
        """Publishes the changes: when this returns, every process may read them."""
        if self._common is not None and self.is_unsaid:
            self.is_unsaid = False
            self._common.written()

    @property
    def free_count(self) -> int:
        """Pages that can be taken now: free ones and idle ones that would be forgotten."""
        return self.pages.free_count + self.prefix.idle_count

    def take(self, count: int) -> PageIds:
        assert count <= self.free_count, f"{count} pages of {self.free_count} that can be taken"
        self.prefix.grant()
        if (short := count - self.pages.free_count) > 0:
            self._clear(np.array(self.prefix.forget_oldest(short), np.int32))
        pages = self.pages.take(count)
        self.taken_digest = crc32(pages.tobytes(), self.taken_digest)
        assert not self.stored[:, pages].any(), "a page was taken with rows of another text"
        return pages

    def hold(self, pages: PageIds) -> None:
        self.pages.hold(pages)
        for page in pages.tolist():
            self.prefix.busy(page)
            assert not self.prefix.is_idle(page), f"page {page} is held and idle"

    def ask(self, pages: PageIds) -> None:
        """Holds pages for a sequence that may still be refused; `take` makes it final."""
        self.pages.hold(pages)
        self.prefix.ask(pages.tolist())

    def refuse(self, pages: PageIds) -> None:
        """Undoes `ask`: idle pages are where they were in their order, and pages idle since then
        follow, as all of these pages do once `take` has made it final."""
        unheld = self.pages.drop(pages)
        self.prefix.refuse()
        for page in unheld[::-1].tolist():
            if not self.prefix.is_idle(page):  # its other holder has left meanwhile
                self.prefix.idle(page)

    def drop(self, pages: PageIds) -> None:
        """Drops a holder of each; a page without holders is kept if published, else cleared."""
        idle = self.pages.drop(pages)
        published = np.array([page in self.prefix for page in idle.tolist()], np.bool_)
        for page in idle[published][::-1].tolist():
            self.prefix.idle(page)
        if not published.all():
            self._clear(idle[~published])

    def forget(self) -> int:
        """Frees all idle pages, so that no prefix leads to them; returns how many."""
        idle = self.prefix.forget_idle()
        self._clear(np.array(idle, np.int32))
        assert self.prefix.idle_count == 0, "an idle page was not forgotten"
        return len(idle)

    def _clear(self, pages: PageIds) -> None:
        assert not any(page in self.prefix for page in pages.tolist()), "a prefix leads here still"
        self._marks[:, pages] = 0
        self.spoil(pages)
        self.pages.give_back(pages)

    def parts(self, page: int) -> list[Bytes]:
        """The memory of a page: its rows layer by layer, then its keys."""
        first = page * PAGE_ROWS
        rows = [layer[first : first + PAGE_ROWS].reshape(-1) for layer in self.layers]
        return [*rows, *(keys[page] for keys in self.keys.pages)]

    def spoil(self, pages: PageIds) -> None:
        """The content of these pages belongs to no text any more: poisons it under test."""
        assert not self.stored[:, pages].any(), "rows that are stored belong to a text"
        if self._poison:
            for page in pages.tolist():
                for part in self.parts(page):
                    part.fill(POISON)

    def mark_rows(self, layers: Layers, host_rows: RowIds) -> None:
        """Notes that these rows of these layers hold their values now."""
        _mark(self.stored, layers, host_rows)
        self.change()

    def mark_keys(self, key_layers: Layers, host_rows: RowIds) -> None:
        _mark(self.keyed, key_layers, host_rows)
        self.change()

    def write_keys(self, key_layer: int, host_rows: RowIds, keys: Bytes) -> None:
        if self.writes:
            self.keys.write(key_layer, host_rows, keys)
        self.mark_keys(key_layer, host_rows)

    def copy_keys(
        self, source: KeyPages, source_rows: RowIds, host_rows: RowIds, *, layers: Sequence[int]
    ) -> None:
        if self.writes:
            self.keys.copy_keys(source, source_rows, host_rows, layers=layers)
        self.mark_keys(layers, host_rows)

    def mark_arrived(self, pages: PageIds, row_count: int) -> None:
        """Notes that the first `row_count` rows of these pages are written in all layers, with
        their keys; poisons the rest of the last page under test."""
        full_count, rest = divmod(row_count, PAGE_ROWS)
        assert len(pages) == full_count + (rest > 0), f"{row_count} rows on {len(pages)} pages"
        assert not self.stored[:, pages].any(), "a page that arrives had rows before"
        self._marks[:, pages[:full_count]] = FULL
        self._marks[:, pages[full_count:]] = np.uint64((1 << rest) - 1)
        self.change()
        if rest and self._poison:
            self._poison_rows(int(pages[-1]), rest)

    def _poison_rows(self, page: int, first: int) -> None:
        rows = np.arange(page * PAGE_ROWS + first, (page + 1) * PAGE_ROWS, dtype=np.int32)
        for layer_rows in self.layers:
            layer_rows[rows] = POISON
        poison = np.full((len(rows), self.keys.key_bytes), POISON, np.uint8)
        for layer in range(self.keys.layer_count):
            self.keys.write(layer, rows, poison)

    def is_stored(self, layer: int, host_rows: RowIds) -> npt.NDArray[np.bool_]:
        assert 0 <= layer < len(self.stored), f"layer {layer} of {len(self.stored)}"
        return _is_marked(self.stored[layer], host_rows)

    def is_keyed(self, key_layer: int, host_rows: RowIds) -> npt.NDArray[np.bool_]:
        assert 0 <= key_layer < len(self.keyed), f"key layer {key_layer} of {len(self.keyed)}"
        return _is_marked(self.keyed[key_layer], host_rows)

    def have_keys(self, pages: PageIds) -> npt.NDArray[np.bool_]:
        """Which of these pages have keys; under test all do, if only poison."""
        have: npt.NDArray[np.bool_] = (self.keyed[:, pages] != 0).any(axis=0)
        return have | self._poison

    def leading_count(self, pages: PageIds) -> int:
        """Length of the sequence on these pages: leading positions that every main layer has."""
        if len(pages) == 0:
            return 0
        common = np.bitwise_and.reduce(self.stored[: self.layout.layer_count, pages], axis=0)
        partial = np.flatnonzero(common != FULL)
        full_count = int(partial[0]) if len(partial) else len(pages)
        if full_count == len(pages):
            return full_count * PAGE_ROWS
        missing = ~int(common[full_count]) & int(FULL)
        assert missing, "a page with all of its rows was taken for a partial one"
        return full_count * PAGE_ROWS + (missing & -missing).bit_length() - 1

    def is_complete(self, page: int | np.int32) -> bool:
        """Whether all 64 rows are stored in all layers, MTP and index keys included."""
        return bool((self._marks[:, page] == FULL).all())

    def complete_count(self, pages: PageIds) -> int:
        """How many of these pages, from the first on, are complete. While the first is not, the
        others, which may be thousands in every step, are not looked at."""
        if len(pages) == 0 or not self.is_complete(pages[0]):
            return 0
        partial = np.flatnonzero((self._marks[:, pages] != FULL).any(axis=0))
        return int(partial[0]) if len(partial) else len(pages)

    def publish(
        self, page: int, content: bytes, *, parent: bytes = b"", text: Sequence[int] = ()
    ) -> bool:
        assert self.pages.hold_count(page) > 0, "only a held page is published"
        assert self.is_complete(page), "a page is published when all of it is stored"
        return self.prefix.publish(page, content, parent=parent, text=text)

    def copy_page(self, source: int, target: int) -> None:
        """Copies a partial page for a fork."""
        assert source != target, f"page {source} onto itself"
        assert target not in self.prefix, f"page {target} is published: its text cannot change"
        assert self.pages.hold_count(target) == 1, f"page {target} is not the fork's alone"
        if self.writes:
            start, into = source * PAGE_ROWS, target * PAGE_ROWS
            for rows in self.layers:
                rows[into : into + PAGE_ROWS] = rows[start : start + PAGE_ROWS]
            self.keys.copy_page(source, target)
        self.change()
        self._marks[:, target] = self._marks[:, source]

    def check(self) -> None:
        self.pages.check()
        self.prefix.check()
        held_count = 0
        has_rows, has_keys = map(np.logical_or.reduce, (self.stored, self.keyed))
        for page in range(self.pages.page_count):
            held = self.pages.hold_count(page) > 0
            held_count += held
            assert not (self.prefix.is_idle(page) and held), f"idle page {page} is held"
            if page in self.prefix:
                assert self.is_complete(page), f"published page {page} is not complete"
                assert self.prefix.is_idle(page) or held, f"page {page} is neither held nor idle"
            elif not held:
                assert not has_rows[page], f"free page {page} has stored rows"
                assert not has_keys[page], f"free page {page} has index keys"
        kept = held_count + self.prefix.idle_count + self.pages.free_count
        assert kept == self.pages.page_count, "free + held + idle pages != all pages"


def split(layout: ModelLayout, memory: Bytes) -> CommonMemory:
    """Splits a pool's memory: rows [layer][host row], then the keys."""
    page_count = len(memory) // layout.host_page_bytes
    assert page_count > 0, f"{len(memory)} bytes hold no page of {layout.host_page_bytes}"
    end = page_count * PAGE_ROWS * layout.token_row_bytes
    return CommonMemory(memory[:end], memory[end:])


def laid_out(
    layout: ModelLayout, memory: Bytes, keys: Bytes
) -> tuple[tuple[Bytes, ...], KeyPages, Bytes]:
    """The rows of each layer; the keys; and the memory of all rows."""
    row_count, layers, end = len(memory) // layout.token_row_bytes, list[Bytes](), 0
    assert row_count % PAGE_ROWS == 0, f"{row_count} rows are no whole pages"
    for row_bytes in layout.layer_bytes(range(layout.layer_total)):
        start, end = end, end + row_count * row_bytes
        layers.append(memory[start:end].reshape(row_count, row_bytes))
    return tuple(layers), KeyPages(layout, keys, row_count // PAGE_ROWS), memory[:end]


def _bits(host_rows: RowIds) -> npt.NDArray[np.uint64]:
    return np.uint64(1) << (host_rows % PAGE_ROWS).astype(np.uint64)


def _mark(mask: npt.NDArray[np.uint64], layers: Layers, host_rows: RowIds) -> None:
    chosen = np.atleast_1d(np.asarray(layers, np.int32))
    if native.available():
        rows = np.ascontiguousarray(host_rows, np.int32)
        at = native.address
        lists = (at(mask), at(chosen), at(rows))
        assert mask.flags.c_contiguous, "the mask is not C-contiguous"
        done = _native_mark()(*lists, *mask.shape, chosen.size, rows.size)
        assert done, f"a row or a layer outside of {mask.shape} pages"
        return
    assert ((chosen >= 0) & (chosen < mask.shape[0])).all(), f"layers {chosen} of {mask.shape}"
    firsts = chosen.astype(np.int64) * mask.shape[1]
    places = (firsts[:, None] + host_rows // PAGE_ROWS).reshape(-1)
    np.bitwise_or.at(mask.reshape(-1), places, np.tile(_bits(host_rows), len(firsts)))


@functools.cache
def _native_mark() -> Callable[..., int]:
    types = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
    return native.function("ess_mark", types, ctypes.c_int32)


def _is_marked(mask: npt.NDArray[np.uint64], host_rows: RowIds) -> npt.NDArray[np.bool_]:
    marked: npt.NDArray[np.bool_] = (mask[host_rows // PAGE_ROWS] & _bits(host_rows)) != 0
    return marked
