"""The disk behind the host pool: pages published there are stored, and read again when the host has
dropped them.

It follows the prefix cache. A published page is copied to the disk by the tier's thread, later, and
nothing holds it until then: its text cannot change while it is published, so a copy is good if the
page was published without a break from before to after (`_mark_of`). That also keeps the pools
free of the disk's timing: no page is held, freed or taken because a write was slow.

Pages that come are read into pages of their sequence that no other sequence knows, beside the
owner's thread. They are marked and published in that thread, in `settle`.

Processes that divide a model have a shelf each, for the layers that each has. Of every prompt as
many pages count as the process with the fewest has (`agree`), so their pools stay alike, whatever
is on their disks and however fast these are. They also agree when a load is given up: its pages may
then go to rows from elsewhere, which one process writes for all, and by then the readers of all
processes have stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Final

from ess.array_types import Bytes, PageIds
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import Claim, DiskTier, Loading
from ess.pool.disk.use import DiskUse
from ess.pool.latent import LatentPool
from ess.units import PAGE_ROWS

Arrived = Callable[[int], None]
"""Told how many pages have come, from the first on."""

Agree = Callable[[list[int]], list[int]]
"""Of processes that call alike: the least of each count. It returns when all have called it."""

LOADING: Final = -1
"""Some pages are on their way."""


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages of a sequence that come from the disk, or are to."""

    pages: PageIds
    claim: Claim
    loading: Loading
    on_arrival: Arrived


class Shelf:
    """Calls come from the offload's thread. `_mark_of` has an object for each publication."""

    def __init__(self, latent: LatentPool, tier: DiskTier | Elsewhere) -> None:
        self.agree: Agree = list
        self._latent = latent
        self._tier = tier
        self._mark_of: dict[bytes, object] = {}
        self._loads: list[PageLoad] = []
        latent.prefix.listeners.append(self)

    @property
    def uses(self) -> DiskUse:
        return self._tier.uses

    # ---- what the prefix cache says

    def published(self, content: bytes, *, parent: bytes, text: Many[int]) -> None:
        [page] = self._latent.prefix.find([content])
        mark = self._mark_of[content] = object()
        self._tier.store(content, partial(self._copy, content, page, mark))

    def forgotten(self, contents: Many[bytes]) -> None:
        for content in contents:
            del self._mark_of[content]
        self._tier.lose(contents)

    def emptied(self) -> None:
        self.forgotten([*self._mark_of])

    def _copy(self, content: bytes, page: int, mark: object, out: Bytes) -> bool:
        """Runs in the tier's thread. It checks the page's mark after the last byte: a page's text
        is forgotten before the page can be taken for other rows."""
        at = 0
        for part in self._latent.parts(page):
            out[at : at + len(part)] = part
            at += len(part)
        return self._mark_of.get(content) is mark

    # ---- pages that come back

    def claim(self, contents: Many[bytes], *, known_count: int) -> Claim:
        """Claims the pages that the disk has behind the `known_count` texts of the host, and counts
        all of these texts as used now."""
        claim = self._tier.claim(contents[known_count:])
        self._tier.use(reversed(contents[:known_count]))
        if len(contents) > known_count:
            [count] = self.agree([len(claim.contents)])
            claim.keep(count)
        return claim

    def leading_count(self, contents: Many[bytes]) -> int:
        return self._tier.leading_count(contents)

    def used(self, pages: PageIds) -> None:
        """These pages of one text, published or not, are not needed for now."""
        contents = [self._latent.prefix.content_of(page) for page in pages.tolist()]
        self._tier.use(content for content in reversed(contents) if content is not None)

    def load_of(self, claim: Claim, pages: PageIds, on_arrival: Arrived) -> PageLoad:
        """A load of the claimed texts into these pages, which their sequence has taken and nothing
        else uses. It has yet to begin (`bring`)."""
        assert len(claim.contents) == len(pages) > 0, f"{len(pages)} pages are to come"
        loading = self._tier.loading(
            claim.contents, lambda place: self._latent.parts(int(pages[place]))
        )
        return PageLoad(pages, claim, loading, on_arrival)

    def bring(self, load: PageLoad) -> None:
        """Reads the pages. After an error the caller drops the load."""
        self._loads.append(load)
        load.loading.begin()

    def settle(self) -> None:
        """Marks and publishes the pages that have come from the disk."""
        if not self._loads:
            return
        loadings = [load.loading for load in self._loads]
        come = [loading.count if loading.is_done else LOADING for loading in loadings]
        for load, count in zip([*self._loads], self.agree(come), strict=True):
            if count != LOADING:
                self._end(load, count)

    def wait(self, load: PageLoad) -> None:
        load.loading.wait()
        self._end(load, *self.agree([load.loading.count]))

    def land(self, load: PageLoad, count: int) -> None:
        """The first `count` pages are there from now on; the others are not wanted any more."""
        load.loading.cancel()
        assert count <= load.loading.count, f"{load.loading.count} pages have come, not {count}"
        self._end(load, count)

    def give_up(self, load: PageLoad) -> None:
        """The pages are not wanted any more; none is written when this returns."""
        load.loading.cancel()
        self._end(load, *self.agree([load.loading.count]))

    def drop(self, load: PageLoad) -> None:
        """After an error, which may be of this process alone: it does not wait for the others."""
        load.loading.cancel()
        self._end(load, 0)

    def _end(self, load: PageLoad, count: int) -> None:
        self._loads = [each for each in self._loads if each is not load]
        load.claim.release()
        self._latent.spoil(load.pages[count:])
        if count:
            self._latent.mark_arrived(load.pages[:count], count * PAGE_ROWS)
            self._latent.say()
        load.on_arrival(count)

    # ---- the whole of it

    def forget(self) -> int:
        return self._tier.forget()

    def drain(self, timeout_s: float) -> None:
        """Waits until all that is published is stored, or for so long."""
        self._tier.flush(timeout_s)

    def check(self) -> None:
        self._tier.check()
        prefix = self._latent.prefix
        for content in self._mark_of:
            assert prefix.find([content]), "a text is filed and not published"
        for load in self._loads:
            assert not self._latent.stored[:, load.pages].any(), "rows lie where others will come"

    def close(self) -> None:
        for load in [*self._loads]:
            self.drop(load)
        self._tier.close()
