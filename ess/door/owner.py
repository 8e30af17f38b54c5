"""What the sequences and steps of one `Offload` share: its pools, its open step, its thread.

An Offload belongs to one thread. That is the thread of its first call after `create`, so that an
engine may be built in one thread and run in another; when that thread has ended, the next thread
that calls takes over. Copies run on a lane of their own, which asks nothing of this.

It belongs to one process too. A forked child has no threads that copy rows or write pages, and
shares the disk's files and shared pools with its parent: there every call but `close` is refused,
and `close` touches nothing.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ess.door.memory.pools import Pools
from ess.door.steps.placement import Placement
from ess.errors import BadInput, BadState
from ess.pool.prefix import LatestHashes

if TYPE_CHECKING:
    from ess.door.sequences.sequence import Sequence
    from ess.door.steps.step import Step


class Owner:
    """`open_step` is the step that may be appended to; `sealed` steps are not learned yet."""

    def __init__(self, pools: Pools, placement: Placement) -> None:
        self.pools = pools
        self.placement = placement
        self.latest_hashes = LatestHashes(pools.layout.page_tokens)
        self.open_step: Step | None = None
        self.sealed: deque[Step] = deque()
        self.is_open = True
        self._opened_count = 0
        self._thread: threading.Thread | None = None
        self._thread_id = -1
        self._process_id = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the process that created the offload."""
        return os.getpid() != self._process_id

    def require(self) -> None:
        """The offload is open and the call comes from its thread."""
        if not self.is_open:
            raise BadState("this offload is closed")
        self.require_thread()

    def require_thread(self) -> None:
        if self.is_forked:
            raise BadState(
                f"this offload belongs to process {self._process_id}, and process {os.getpid()} is"
                " a fork of it: create another one here"
            )
        if threading.get_ident() != self._thread_id:
            self._take_over()

    def _take_over(self) -> None:
        caller, before = threading.current_thread(), self._thread
        if before is not None and before.is_alive():
            raise BadState(
                f"this offload belongs to thread {before.name!r}, the call comes from thread "
                f"{caller.name!r}: make all calls in one thread"
            )
        self._thread, self._thread_id = caller, threading.get_ident()

    def require_between_steps(self) -> None:
        self.require()
        self.require_unbroken()
        if self.open_step is not None:
            raise BadState(f"step {self.open_step.number} is open: commit or abandon it first")

    def require_unbroken(self) -> None:
        """No step has broken off at its end."""
        for step in (*self.sealed, self.open_step):
            if step is not None:
                step.require_unbroken()

    def own(self, sequences: Iterable[Sequence]) -> tuple[Sequence, ...]:
        """These sequences, each of which this offload has opened."""
        if not hasattr(sequences, "__iter__"):
            raise BadInput(f"sequences is {sequences!r}, must be a list of sequences")
        listed = tuple(sequences)
        for sequence in listed:
            if getattr(sequence, "owner", None) is not self:
                raise BadInput(f"{sequence!r} was not opened by this offload")
        return listed

    def next_number(self) -> int:
        self._opened_count += 1
        return self._opened_count - 1

    def check(self) -> None:
        if self.open_step is not None:
            assert self.open_step.state == "open", f"{self.open_step!r} is the open step"
            self.open_step.check()
        for step in self.sealed:
            assert step.state == "sealed", f"{step!r} waits to be learned"
            step.check()
        numbers = [step.number for step in self.sealed]
        assert numbers == sorted(numbers), (
            f"steps are learned in the order of their seals: {numbers}"
        )
