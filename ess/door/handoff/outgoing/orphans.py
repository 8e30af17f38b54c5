"""Reserved messages whose request has not come yet: a request and its reservation travel
separately."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ess.door.handoff.outgoing.departure import Target
from ess.transfer.messages import Reason

ORPHANS_MAX: Final = 4096
ORPHAN_PAGES_MAX: Final = 1 << 22


class Orphans:
    """Bounded in number and in pages. The oldest goes first; each stays until it is adopted or its
    time is up."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._targets: dict[int, Target] = {}
        self._page_count = 0

    def __len__(self) -> int:
        return len(self._targets)

    def __contains__(self, uid: int) -> bool:
        return uid in self._targets

    def keep(self, uid: int, target: Target) -> Reason | None:
        """Why it cannot be kept, or None. A peer's latest word counts."""
        known = self._targets.get(uid)
        if known is not None and known.peer != target.peer:
            return Reason.DUPLICATE
        self.adopt(uid)
        page_count = self._page_count + len(target.pages)
        if len(self) >= ORPHANS_MAX or page_count > ORPHAN_PAGES_MAX:
            return Reason.FULL
        self._targets[uid] = target
        self._page_count = page_count
        return None

    def adopt(self, uid: int) -> Target | None:
        """Takes out the reservation of a request that has come, or is not wanted any more."""
        target = self._targets.pop(uid, None)
        if target is not None:
            self._page_count -= len(target.pages)
        return target

    def released(self, uid: int, peer: int) -> None:
        if uid in self and self._targets[uid].peer == peer:
            self.adopt(uid)

    def lost(self, peer: int) -> None:
        for uid in [uid for uid, target in self._targets.items() if target.peer == peer]:
            self.adopt(uid)

    def expired(self, now_s: float) -> Iterator[tuple[int, int]]:
        """The uid and the peer of each whose time is up; they are gone."""
        for uid, target in list(self._targets.items()):
            if target.came_s + self._wait_s > now_s:
                return
            self.adopt(uid)
            yield uid, target.peer

    def check(self) -> None:
        page_count = sum(len(target.pages) for target in self._targets.values())
        assert page_count == self._page_count, f"{page_count} pages, {self._page_count} counted"
        assert len(self) <= ORPHANS_MAX, f"{len(self)} orphans"
        assert page_count <= ORPHAN_PAGES_MAX, f"{page_count} pages of orphans"
        times = [target.came_s for target in self._targets.values()]
        assert times == sorted(times), "the oldest come first"
