"""The thread that writes: a queue of pages in, records and rows of the catalogue out, in batches.

The order within a batch makes a crash harmless at any moment. The rows of the records to be
overwritten are deleted; then the bytes are written and synced; then the new rows are written. Each
transaction is on the disk before the next step begins. So whenever the power goes, a row leads to
its own bytes, to none, or to bytes that its checksum refuses.

A queued page is neither copied nor held in its pool: the thread copies it when its turn comes, and
then asks whether it still had that text (`Copy`).
"""

from __future__ import annotations

import errno
import math
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

from ess.array_types import Bytes
from ess.errors import reason_of
from ess.pool.disk.catalogue import ERRORS, Catalogue, Entry
from ess.pool.disk.records import Records
from ess.pool.disk.slab import Slab, checksum

Copy = Callable[[Bytes], bool]
"""Copies a page to the given place; False where its text changed before the copy was done."""

Note = Callable[[str], None]
"""Takes a sentence for the person who runs the process."""

BATCH_BYTES: Final = 64 << 20
BATCH_MAX: Final = 256
QUEUE_MAX: Final = 1 << 16
AGAIN_S: Final = 60.0
"""How long after a full disk refused pages it is offered another."""


def unsaid(sentence: str) -> None:
    """A `Note` for tests and tools, which look at the counts themselves."""


class Writer:
    """The writing thread. `lock` guards records, queue and counts. `fault` says why no more pages
    are stored; it is empty while all is well.

    A batch takes records: free ones, and those of texts that the catalogue is told to forget
    (`_gone`). Where a disk refuses the batch, the latter are `_kept_back`: the catalogue may still
    name them, and is told again before they are used. The next batch takes them first, so on a
    disk that stays full later tries make no more texts give way."""

    def __init__(self, slab: Slab, catalogue: Catalogue, records: Records, note: Note) -> None:
        self.lock = threading.Condition()
        self.fault = ""
        self.stored_count = self.dropped_count = 0
        self.seconds = 0.0
        self._slab = slab
        self._catalogue = catalogue
        self._records = records
        self._note = note
        self._queue: OrderedDict[bytes, Copy] = OrderedDict()
        self._leaving: list[Entry] = []
        self._gone: list[Entry] = []
        self._kept_back: list[Entry] = []
        self._taken: list[int] = []
        self._again_s = -math.inf
        self._is_busy = self._is_ending = self._is_over = False
        self._page = np.empty(slab.record_bytes, np.uint8)
        self._batch_max = max(1, min(BATCH_MAX, BATCH_BYTES // slab.record_bytes))
        self._thread = threading.Thread(target=self._run, name="ess-disk-writer", daemon=True)
        self._thread.start()

    # ---- under the lock

    def add(self, content: bytes, copy: Copy) -> None:
        if content in self._queue:
            return
        is_refused = bool(self.fault) and time.monotonic() < self._again_s
        if is_refused or self._is_ending or len(self._queue) >= QUEUE_MAX:
            self.dropped_count += 1
            return
        self._tell_again()
        self._queue[content] = copy
        self.lock.notify_all()

    def lose(self, content: bytes) -> None:
        """The page of this text is about to hold another text."""
        if self._queue.pop(content, None) is not None:
            self.dropped_count += 1

    def remove(self, entry: Entry) -> None:
        """Makes the text unfindable now; frees its record once the catalogue has forgotten it."""
        self._records.remove(entry)
        self._leaving.append(entry)
        self.lock.notify_all()

    def remove_all(self) -> None:
        self._tell_again()
        self._leaving += self._records.remove_all()
        self.lock.notify_all()

    def _tell_again(self) -> None:
        self._leaving += self._kept_back
        self._kept_back.clear()

    def clear_queue(self) -> None:
        self.dropped_count += len(self._queue)
        self._queue.clear()

    @property
    def is_idle(self) -> bool:
        return not (self._is_busy or self._queue or self._leaving)

    @property
    def queue_count(self) -> int:
        return len(self._queue)

    def check(self) -> None:
        entries = (*self._leaving, *self._gone, *self._kept_back)
        self._records.check(taken_count=len(entries) + len(self._taken))

    # ---- the caller's thread

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is left to write; False if that takes longer than `timeout_s`."""
        with self.lock:
            return self.lock.wait_for(lambda: self.is_idle or self._is_over, timeout_s)

    def end(self) -> None:
        """Drops the queue and ends the thread."""
        with self.lock:
            self._is_ending = True
            self.clear_queue()
            self.lock.notify_all()
        self._thread.join()

    # ---- its own thread

    def _run(self) -> None:
        try:
            self._write_all()
        finally:
            with self.lock:
                self._is_over = True
                self.lock.notify_all()

    def _write_all(self) -> None:
        is_over = False
        while not is_over:
            with self.lock:
                self.lock.wait_for(lambda: self._is_ending or not self.is_idle)
                batch = self._next_batch()
                self._gone, self._leaving = self._leaving, []
                is_over = self._is_ending and not batch
                self._is_busy = True
            try:
                self._write(batch, is_last=is_over)
            except (OSError, *ERRORS) as error:
                self._stop(error, len(batch), is_over=is_over)
            finally:
                with self.lock:
                    self._is_busy = False
                    self.lock.notify_all()

    def _next_batch(self) -> list[tuple[bytes, Copy]]:
        count = min(len(self._queue), self._batch_max)
        batch = [self._queue.popitem(last=False) for _ in range(count)]
        self._records.use(content for content, _ in batch)
        return [wanted for wanted in batch if wanted[0] not in self._records]

    def _write(self, batch: list[tuple[bytes, Copy]], *, is_last: bool) -> None:
        began_s = time.monotonic()
        with self.lock:
            records, victims = self._records.take(max(0, len(batch) - len(self._gone)))
            self._taken = records[: len(records) - len(victims)]
            records += [entry.record for entry in self._gone]
            self._gone += victims
        self._catalogue.change(gone=[entry.content for entry in self._gone])
        written = self._write_pages(batch, records)
        with self.lock:
            self._records.stamp(reversed(written))
            uses = [*self._records.uses.values()] if batch or is_last else []
        self._catalogue.change(come=written, used=uses)
        kept = {entry.record for entry in written}
        with self.lock:
            for entry in uses:
                self._records.uses.pop(entry.content, None)
            for entry in reversed(written):
                self._records.add(entry)
            self._records.put_back(record for record in records if record not in kept)
            self._gone, self._taken = [], []
            self.stored_count += len(written)
            self.dropped_count += len(batch) - len(written)
            self.seconds += time.monotonic() - began_s if batch else 0.0
            was_refused, self.fault = bool(self.fault), "" if written else self.fault
        if was_refused and written:
            self._note("the disk takes pages again")

    def _write_pages(self, batch: list[tuple[bytes, Copy]], records: list[int]) -> list[Entry]:
        written = []
        for (content, copy), record in zip(batch, records, strict=False):
            if copy(self._page):
                self._slab.write(record, self._page)
                written.append(Entry(content, record, checksum(content, [self._page]), 0))
        if written:
            self._slab.sync()
        return written

    def _stop(self, error: Exception, batch_count: int, *, is_over: bool) -> None:
        """Stores no more pages; where the disk is full, none for a while. A disk that has
        broken stays so until a restart, even if it is full as well."""
        with self.lock:
            self.clear_queue()
            self.dropped_count += batch_count
            self._records.put_back(self._taken)
            self._kept_back += self._gone
            self._gone, self._taken = [], []
            again_s = time.monotonic() + AGAIN_S if _is_full(error) else math.inf
            breaks_now = again_s == math.inf and self._again_s < math.inf
            is_news = not self.fault or breaks_now
            self._again_s = max(self._again_s, again_s)
            if is_news and not is_over:
                self.fault = f"the disk takes no more pages: {reason_of(error)}"
        if is_news and not is_over:
            again = f"it is tried again every {AGAIN_S:g} s"
            then = again if _is_full(error) else "a restart stores again"
            self._note(f"{self.fault}; those it has are read on, and {then}")


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
