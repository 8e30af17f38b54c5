"""Leading pages of a preempted sequence that it holds on the disk only, and how they come back.

Pages that are put away must be on the disk and stay there (`Claim`); then the host pages are
dropped. These may stay in the host's prefix cache for a while; as long as they do, nothing need be
read from the disk to bring them back.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ess.array_types import PageIds
from ess.door.memory.pools import Pools
from ess.door.sequences.holding import Holding
from ess.pool.disk.tier import Claim

STORE_S: Final = 1.0
"""So long it is waited for that pages which are to be put away are stored."""


class Shelved:
    def __init__(self, pools: Pools, holding: Holding, claim: Claim) -> None:
        self._pools = pools
        self._holding = holding
        self._claim = claim
        holding.give_up_first(len(claim.contents))

    def bring_back(self) -> bool:
        """The holding has all of its pages again, or it is as before and False: a page is lost.
        PoolFull if there is no room. If the wait is broken off, it is as before, too."""
        pools, contents = self._pools, self._claim.contents
        assert pools.shelf is not None, "what is shelved lies on a disk"
        known = np.array(pools.latent.prefix.find(contents), np.int32)
        fresh = self._holding.take_first(known, len(contents) - len(known))
        is_back = False
        try:
            is_back = not len(fresh) or self._read(fresh)
        finally:
            if not is_back:
                self._holding.give_up_first(len(contents))
        if is_back:
            self._claim.release()
        return is_back

    def _read(self, fresh: PageIds) -> bool:
        shelf, contents = self._pools.shelf, self._claim.contents
        assert shelf is not None, "what is shelved lies on a disk"
        counts: list[int] = []
        claim = shelf.claim(contents, known_count=len(contents) - len(fresh))
        if len(claim.contents) < len(fresh):
            claim.release()
            return False
        load = shelf.load_of(claim, fresh, counts.append)
        try:
            shelf.bring(load)
            shelf.wait(load)
        except BaseException:
            shelf.drop(load)
            raise
        return counts == [len(fresh)]

    def let_go(self) -> None:
        self._claim.release()


def put_away(
    pools: Pools, holding: Holding, contents: list[bytes], *, page_max: int
) -> Shelved | None:
    """Puts away as many of these texts, at most `page_max`, as are on the disk within a second."""
    if pools.shelf is None or not contents:
        return None
    pools.shelf.drain(STORE_S)
    claim = pools.shelf.claim(contents[:page_max], known_count=0)
    return Shelved(pools, holding, claim) if claim.contents else None
