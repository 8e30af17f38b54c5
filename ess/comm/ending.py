"""How a group ends: once, for every rank, with the sentence of the first rank that failed.

Peers get the reason before this rank's own threads learn of the end: a thread may then leave at
once, and no peer has to guess the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ess.comm.link import LinkLost


class Ending:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._tells: list[Callable[[LinkLost], None]] = []
        self._wakes: list[Callable[[], None]] = []
        self.lost: LinkLost | None = None

    def register(self, *, tell: Callable[[LinkLost], None], wake: Callable[[], None]) -> None:
        """When the group fails, the failing thread calls every `tell`, then every `wake`."""
        self._tells.append(tell)
        self._wakes.append(wake)

    def fail(self, lost: LinkLost) -> None:
        """Returns when all peers are told. Only the first sentence is kept and told."""
        with self._lock:
            if self.lost is not None:
                return
            for tell in self._tells:
                tell(lost)
            self.lost = lost
        self._ended.set()
        for wake in self._wakes:
            wake()

    def wait(self, timeout_s: float) -> None:
        self._ended.wait(timeout_s)

    def check(self) -> None:
        lost = self.lost
        if lost is not None:
            raise LinkLost(lost.rank, str(lost)) from lost.__cause__
