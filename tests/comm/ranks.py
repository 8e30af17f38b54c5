"""Ranks as processes, read line by line; none outlives its test."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ess.ports import kept_port
from tests.house.tree import ROOT
from tests.support.forked import started

LIMIT_S = 180


class Rank:
    def __init__(self, act: str, rank: int, size: int, port: str, team: int, env: dict[str, str]):
        words = [act, str(rank), str(size), port, str(team)]
        module = ["-m", "tests.comm.peer_process"]
        self.process = started(
            "engine", [*module, *words], env=env, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self.process.stdout as said:
            for line in said:
                self._lines.put(line.rstrip("\n"))
        self._lines.put("ended")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()

    def line(self) -> str:
        return self._lines.get(timeout=LIMIT_S)

    def lines(self) -> list[str]:
        """All that is still to come."""
        return list(iter(self.line, "ended"))

    def until(self, word: str) -> None:
        while (line := self.line()) != word:
            assert line != "ended", f"it never said {word}"

    def signal(self, number: signal.Signals) -> float:
        self.process.send_signal(number)
        return time.monotonic()


@contextmanager
def ranks(act: str, size: int, *, team: int = 1) -> Iterator[list[Rank]]:
    with kept_port("127.0.0.1") as port:
        group = [Rank(act, rank, size, str(port), team, environment()) for rank in range(size)]
        try:
            yield list(group)
        finally:
            for rank in group:
                rank.end()


def environment() -> dict[str, str]:

    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
