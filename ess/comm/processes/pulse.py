"""A thread that twice a second sends a heartbeat to the peers and reads theirs.

Silence counts only while this rank runs: after this rank has paused, the count starts anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

from ess.comm.ending import Ending
from ess.comm.group import Beat
from ess.comm.link import LinkLost
from ess.comm.processes.wired import WiredLink

BEAT_S: Final = 0.5
AWAY_S: Final = 1.0


class Pulse:
    def __init__(
        self,
        links: Mapping[int, WiredLink],
        names: Mapping[int, str],
        ending: Ending,
        *,
        silent_s: float,
    ) -> None:
        self._links = links
        self._names = names
        self._ending = ending
        self._silent_s = silent_s
        self._progress = 0
        self._looked_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._looked_s = time.monotonic()
        self._thread.start()

    def advance(self) -> None:
        self._progress += 1

    def beats(self) -> dict[int, Beat]:
        now_s = time.monotonic()
        return {
            rank: Beat(
                link.heard.progress,
                max(0.0, now_s - link.heard.heard_s),
                max(0.0, now_s - link.heard.moved_s),
            )
            for rank, link in self._links.items()
        }

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set() and self._ending.lost is None:
            for link in self._links.values():
                link.beat(self._progress)
            self._listen()
            self._over.wait(BEAT_S)

    def _listen(self) -> None:
        now_s = time.monotonic()
        was_away = now_s - self._looked_s > BEAT_S + AWAY_S
        self._looked_s = now_s
        for rank, link in self._links.items():
            if was_away or link.is_deaf:
                link.heard.heard_s = now_s
            elif now_s - link.heard.heard_s > self._silent_s:
                silent_s = now_s - link.heard.heard_s
                sentence = f"{self._names[rank]} is lost: no beat of it came for {silent_s:.1f} s"
                self._ending.fail(LinkLost(rank, sentence))
