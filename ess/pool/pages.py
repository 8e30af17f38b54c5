"""Reference-counted pages of 64 rows.

A page is free, held (count > 0), or idle: without a holder but not given back yet. The two pools
differ in idle pages. The latent pool keeps them as prefix cache until it needs room; the index pool
keeps them until the last copy that touches them has landed, so that a reused id never serves
another prompt's row. This class only counts; its owner decides what idle means.
"""

from __future__ import annotations

import numpy as np

from ess.array_types import PageIds


class PagePool:
    def __init__(self, page_count: int) -> None:
        assert page_count > 0, f"a pool of {page_count} pages"
        self._hold_count = np.zeros(page_count, np.int32)
        self._is_free = np.ones(page_count, np.bool_)
        self._free = np.arange(page_count - 1, -1, -1, dtype=np.int32)
        self._free_count = page_count

    @property
    def page_count(self) -> int:
        return len(self._is_free)

    @property
    def free_count(self) -> int:
        return self._free_count

    def hold_count(self, page: int) -> int:
        assert 0 <= page < self.page_count, f"page {page} of {self.page_count}"
        return int(self._hold_count[page])

    def take(self, count: int) -> PageIds:
        """`count` free pages, each held once. The caller has made sure that there are enough."""
        assert 0 <= count <= self._free_count, f"{count} pages of {self._free_count} free ones"
        self._free_count -= count
        pages = self._free[self._free_count : self._free_count + count][::-1].copy()
        assert self._is_free[pages].all(), "a page in use stood in the free list"
        assert not self._hold_count[pages].any(), "a free page has holders"
        self._is_free[pages] = False
        self._hold_count[pages] = 1
        return pages

    def hold(self, pages: PageIds) -> None:
        """Adds a holder to each page; an idle page is in use again."""
        assert not self._is_free[pages].any(), "a free page cannot be held, only taken"
        np.add.at(self._hold_count, pages, 1)

    def drop(self, pages: PageIds) -> PageIds:
        """Removes a holder from each page; returns those that are idle now."""
        np.subtract.at(self._hold_count, pages, 1)
        assert (self._hold_count[pages] >= 0).all(), "a page was dropped more often than held"
        idle: PageIds = pages[self._hold_count[pages] == 0]
        return idle

    def give_back(self, pages: PageIds) -> None:
        """Frees idle pages."""
        assert not self._is_free[pages].any(), "a page was given back twice"
        assert (self._hold_count[pages] == 0).all(), "a held page cannot be given back"
        self._is_free[pages] = True
        self._free[self._free_count : self._free_count + len(pages)] = pages
        self._free_count += len(pages)

    def check(self) -> None:
        assert len(self._free) == self.page_count, "the free list has room for other than all pages"
        free = self._free[: self._free_count]
        assert len(np.unique(free)) == self._free_count, "the free list names a page twice"
        assert self._is_free[free].all(), "the free list names a page in use"
        assert int(self._is_free.sum()) == self._free_count, "a free page is on no list"
        assert (self._hold_count[self._is_free] == 0).all(), "a free page has holders"
        assert (self._hold_count >= 0).all(), "a negative count"
