"""A link slowed down for benchmarks, so that one machine behaves like a network.

A frame occupies the line for as long as its bytes take, one after another, and arrives `latency_s`
later. Asynchronous: a thread carries frames, and `send` waits only when `AHEAD_MAX` are on their
way. Synchronous: `send` returns when the peer has taken the frame.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ess.comm.link import AHEAD_MAX, PATIENCE_S, Frame, Link, LinkLost, took_nothing
from ess.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor


class Delayed:
    def __init__(
        self, link: Link, latency_s: float, bytes_per_s: float, *, is_async: bool = True
    ) -> None:
        if latency_s < 0 or bytes_per_s <= 0:
            raise BadInput(
                f"latency_s is {latency_s}, must be 0 or more; bytes_per_s is {bytes_per_s}, must"
                " be above 0"
            )
        self.peer = link.peer
        self._link = link
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._is_async = is_async
        self._free_s = 0.0
        self._changed = threading.Condition()
        self._under_way: deque[tuple[float, Frame]] = deque()
        self._lost: LinkLost | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._carry, name="delayed", daemon=True)
        if is_async:
            self._thread.start()

    def send(self, head: bytes, tensor: Tensor | None = None) -> None:
        due_s = self._due_s(len(head) + (0 if tensor is None else tensor.nbytes))
        if not self._is_async:
            _sleep_until(due_s)
            self._link.send(head, tensor)
            self._link.flush()
            return
        self._wait(AHEAD_MAX - 1)
        with self._changed:
            self._under_way.append((due_s, Frame(head, tensor)))
            self._changed.notify_all()

    def flush(self) -> None:
        if self._is_async:
            self._wait(0)
        self._link.flush()

    def receive(self, timeout_s: float | None = 0.0) -> Frame | None:
        return self._link.receive(timeout_s)

    def close(self) -> None:
        try:
            self.restore()
        finally:
            self._link.close()

    def restore(self) -> Link:
        """The original link, once all frames have arrived."""
        try:
            if self._is_async:
                self._wait(0)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
        return self._link

    def _due_s(self, size: int) -> float:
        """When the last byte of a frame arrives that enters the line as soon as it is free."""
        self._free_s = max(self._free_s, time.monotonic()) + size / self._bytes_per_s
        return self._free_s + self._latency_s

    def _wait(self, most: int) -> None:
        with self._changed:
            came = self._changed.wait_for(
                lambda: len(self._under_way) <= most or self._lost is not None, PATIENCE_S
            )
        if self._lost is not None:
            raise LinkLost(self._lost.rank, str(self._lost)) from self._lost
        if not came:
            raise took_nothing(self.peer, f"rank {self.peer}", PATIENCE_S)

    def _carry(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or bool(self._under_way))
                    if not self._under_way:
                        return
                    due_s, frame = self._under_way[0]
                _sleep_until(due_s)
                self._link.send(frame.head, frame.tensor)
                self._carried()
        except LinkLost as lost:
            with self._changed:
                self._lost = lost
                self._changed.notify_all()

    def _carried(self) -> None:
        with self._changed:
            self._under_way.popleft()
            self._changed.notify_all()


def _sleep_until(due_s: float) -> None:
    time.sleep(max(0.0, due_s - time.monotonic()))
