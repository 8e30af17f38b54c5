"""The index pool: index keys of active requests on the device, and their page tables.

An active page names 64 rows in every layer while some request is active: row id = active page * 64
+ offset. Requests with an equal prefix hold the same active page, hence the same row ids, hence the
same slots. `host_page_of` is the one map from active to host.

A page that lost its last holder is *leaving*: copies that touch it may still be under way. Its
host page can already become active again under another id; its own id is free only after `free`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ess.array_types import Bytes, PageIds, RowIds
from ess.layout import ModelLayout
from ess.pool.keys import KeyPages
from ess.pool.latent import LatentPool
from ess.pool.pages import PagePool
from ess.units import PAGE_ROWS

NONE = -1


class ActivePages(ABC):
    """Which pages are active, and the host page of each. Subclasses hold the keys."""

    def __init__(self, *, page_count: int, host_page_count: int) -> None:
        self.pages = PagePool(page_count)
        self.host_page_of = np.full(page_count, NONE, np.int32)
        self._active_of = np.full(host_page_count, NONE, np.int32)

    @abstractmethod
    def _load(self, host_pages: PageIds, active: PageIds, latent: LatentPool) -> None:
        """Copies keys of host pages into pages that have just become active. Pages without keys
        may be left out: no sequence reads them."""

    @abstractmethod
    def write_keys(self, layer: int, rows: RowIds, keys: Bytes) -> None:
        """Writes keys that the host has into active pages."""

    @abstractmethod
    def copy_page(self, source: int, target: int) -> None:
        """Copies all keys of one active page into another."""

    def active_of(self, host_pages: PageIds) -> PageIds:
        """The active page of each host page, -1 where there is none."""
        active: PageIds = self._active_of[host_pages]
        return active

    def new_count(self, host_pages: PageIds) -> int:
        """How many free pages `activate` would take for these."""
        return int((self._active_of[host_pages] == NONE).sum())

    def activate(self, host_pages: PageIds, latent: LatentPool) -> PageIds:
        """Active pages of these host pages: shared if active already, else with keys loaded. If
        that fails, they are as before."""
        active = self.active_of(host_pages)
        fresh = active == NONE
        self.pages.hold(active[~fresh])
        active[fresh] = self.pages.take(int(fresh.sum()))
        self.host_page_of[active[fresh]] = host_pages[fresh]
        self._active_of[host_pages[fresh]] = active[fresh]
        try:
            self._load(host_pages[fresh], active[fresh], latent)
        except BaseException:
            self.free(self.leave(active))
            raise
        assert (self._active_of[host_pages] == active).all(), "a host page is named twice"
        return active

    def leave(self, active: PageIds) -> PageIds:
        """Drops a holder of each; returns the pages that leave, whose host pages may be
        activated."""
        leaving = self.pages.drop(active)
        assert (self.host_page_of[active] != NONE).all(), "a page that is not active was left"
        self._active_of[self.host_page_of[leaving]] = NONE
        return leaving

    def free(self, leaving: PageIds) -> None:
        """Frees these ids: no slot and no copy refers to them any more."""
        assert (self.host_page_of[leaving] != NONE).all(), "a page was freed that had not left"
        active = self._active_of[self.host_page_of[leaving]]
        assert (active != leaving).all(), "a page that sequences still use was freed"
        self.host_page_of[leaving] = NONE
        self.pages.give_back(leaving)

    def host_rows(self, rows: RowIds) -> RowIds:
        host: RowIds = self.host_page_of[rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS
        assert (host >= 0).all(), "a row of a page that is not active"
        return host

    def check(self) -> None:
        self.pages.check()
        for host_page in np.flatnonzero(self._active_of != NONE).tolist():
            active = int(self._active_of[host_page])
            assert self.host_page_of[active] == host_page, f"active page {active} maps elsewhere"
            assert self.pages.hold_count(active) > 0, f"active page {active} has no holder"
        for active, host_page in enumerate(self.host_page_of.tolist()):
            if self.pages.hold_count(active):
                assert self._active_of[host_page] == active, f"host page {host_page} maps elsewhere"
        named_count = int((self.host_page_of != NONE).sum())
        assert named_count + self.pages.free_count == self.pages.page_count, (
            "active + leaving + free pages != all pages"
        )


class IndexPool(ActivePages):
    """Keys in host memory; `fd` is their memory file, if they lie in one."""

    def __init__(
        self,
        layout: ModelLayout,
        memory: Bytes,
        *,
        page_count: int,
        host_page_count: int,
        fd: int | None = None,
    ) -> None:
        super().__init__(page_count=page_count, host_page_count=host_page_count)
        self.fd = fd
        self.keys = KeyPages(layout, memory, page_count)

    def _load(self, host_pages: PageIds, active: PageIds, latent: LatentPool) -> None:
        assert not latent.is_unsaid, "keys are read before they are said"
        chosen = latent.have_keys(host_pages)
        self.keys.copy_pages(latent.keys, host_pages[chosen], active[chosen])

    def write_keys(self, layer: int, rows: RowIds, keys: Bytes) -> None:
        self.keys.write(layer, rows, keys)

    def copy_page(self, source: int, target: int) -> None:
        self.keys.copy_page(source, target)


def page_rows(active: PageIds) -> RowIds:
    """All row ids of these pages, page after page."""
    assert (active >= 0).all(), f"no page has the number {active[active < 0][:1]}"
    offsets = np.arange(PAGE_ROWS, dtype=np.int32)
    rows: RowIds = (active[:, None] * np.int32(PAGE_ROWS) + offsets).reshape(-1)
    return rows


class PageTables:
    """A line of active pages for each active sequence: how kernels turn positions into rows.

    `lengths` is the device's own count of each line's positions. It may be ahead of the host's: a
    step adds what it accepts here at once, the host learns it later. `texts` counts tokens in the
    same way, where a position holds several.
    """

    def __init__(self, *, sequence_max: int, page_max: int) -> None:
        self.lines = np.full((sequence_max, page_max), NONE, np.int32)
        self.lengths = np.full(sequence_max, NONE, np.int32)
        self.texts = np.full(sequence_max, NONE, np.int32)
        self._free = list(range(sequence_max - 1, -1, -1))

    @property
    def page_max(self) -> int:
        return int(self.lines.shape[1])

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self) -> int:
        assert self._free, f"all {len(self.lines)} lines are taken"
        line = self._free.pop()
        assert self.lengths[line] == NONE, f"line {line} was free with a length"
        return line

    def enter(self, active: PageIds, length: int) -> int:
        """Takes a free line for these pages and this many positions."""
        line = self.take()
        try:
            self.extend(line, 0, active)
            self.set_length(line, length)
        except BaseException:
            self.give_back(line)
            raise
        return line

    def extend(self, line: int, first: int, active: PageIds) -> None:
        """Sets pages of a line from number `first` on. Only a device may know the line's length."""
        assert first == 0 or self.lines[line, first - 1] != NONE, f"line {line} grows behind a gap"
        self.lines[line, first : first + len(active)] = active

    def set_length(self, line: int, length: int) -> None:
        assert length >= 0, f"a length of {length}"
        self.lengths[line] = length

    def advance(self, lines: list[int], counts: list[int]) -> None:
        """Adds each count to the length of its line."""
        for line, count in zip(lines, counts, strict=True):
            self.lengths[line] += count

    def set_text(self, line: int, length: int) -> None:
        assert length >= 0, f"a text of {length} tokens"
        self.texts[line] = length

    def advance_texts(self, lines: list[int], counts: list[int]) -> None:
        assert (self.texts[lines] >= 0).all(), f"of lines {lines} some have no text"
        self.texts[lines] += np.array(counts, np.int32)

    def give_back(self, line: int) -> None:
        assert 0 <= line < len(self.lines), f"line {line} of {len(self.lines)}"
        assert line not in self._free, f"line {line} was given back twice"
        self.lines[line] = NONE
        self.lengths[line] = self.texts[line] = NONE
        self._free.append(line)

    def rows(self, line: int, start: int, count: int) -> RowIds:
        """Row ids of `count` positions from `start` on."""
        assert start >= 0, f"a position of {start}"
        return self.rows_of(line, np.arange(start, start + count, dtype=np.int32))

    def rows_of(self, line: int, positions: RowIds) -> RowIds:
        """Row ids of some positions of one line."""
        return self.rows_at(np.full(len(positions), line, np.int32), positions)

    def rows_at(self, lines: RowIds, positions: RowIds) -> RowIds:
        """Row ids of positions, each in a line of its own."""
        pages = self.lines[lines, positions // PAGE_ROWS]
        assert (pages >= 0).all(), f"no page for position {positions[pages < 0][:1]}"
        rows: RowIds = pages * np.int32(PAGE_ROWS) + positions % np.int32(PAGE_ROWS)
        return rows

    def check(self, pages: PagePool) -> None:
        """Audits; `pages` counts a holder for each line that names a page."""
        free = set(self._free)
        assert len(free) == len(self._free), "the free list names a line twice"
        assert (self.lines[self._free] == NONE).all(), "a free line has pages"
        assert (self.lengths[self._free] == NONE).all(), "a free line has a length"
        for line in set(range(len(self.lines))) - free:
            is_page = self.lines[line] != NONE
            count = int(is_page.sum())
            assert is_page[:count].all(), f"line {line} has a page behind a gap"
            assert 0 <= self.lengths[line] <= count * PAGE_ROWS, (
                f"line {line}: {int(self.lengths[line])} positions on {count} pages"
            )
        named, line_count = np.unique(self.lines[self.lines != NONE], return_counts=True)
        for page, count in zip(named.tolist(), line_count.tolist(), strict=True):
            held = pages.hold_count(page)
            assert held == count, f"page {page}: {held} holders, but {count} lines name it"
