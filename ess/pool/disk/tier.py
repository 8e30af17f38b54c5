"""Pages on disk by the hash of their text: those that the host pool forgot, and those that it had
when the process ended.

The tier knows bytes, not pools. Its methods never wait for the disk in the caller's thread unless
they say so, and never raise for it: a page that cannot be read whole is not there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from ess.errors import BadInput, BadState
from ess.pool.capacity import whole_count
from ess.pool.disk.folder import DiskFolder
from ess.pool.disk.records import Records
from ess.pool.disk.slab import Parts, checksum
from ess.pool.disk.use import DiskUse
from ess.pool.disk.writer import Copy, Note, Writer, unsaid
from ess.units import parse_size, shown

READERS: Final = 2
READ_MAX: Final = 8
"""The most pages that a reader takes at a time."""
CLOSE_S: Final = 5.0
Submit = Callable[[Callable[..., None], Future[int], Callable[[], int]], object]
"""Calls a function with what follows it, perhaps in another thread."""


class DiskTier:
    """Pages in a folder; `opened` says why a folder that had pages starts empty."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        identity: bytes,
        page_bytes: int,
        capacity_bytes: int | str,
        note: Note = unsaid,
    ) -> None:
        """`identity` covers all that a page's bytes depend on besides its text; `capacity_bytes`
        may be written as "64MiB". `note` is called, in the tier's or the caller's thread, when
        pages are damaged and when the disk takes no more."""
        if not isinstance(identity, bytes):
            raise BadInput(f"identity is {shown(identity)}, must be bytes")
        if type(page_bytes) is not int or page_bytes < 1:
            raise BadInput(f"page_bytes is {shown(page_bytes)}, must be a layout's host_page_bytes")
        capacity = parse_size(capacity_bytes, "capacity_bytes")
        stride = page_bytes + -page_bytes % 4096
        record_max = whole_count("prefix_cache_disk", capacity, stride)
        self.page_bytes = page_bytes
        self._folder = DiskFolder(
            Path(folder), identity=identity, page_bytes=page_bytes, record_max=record_max
        )
        self.opened = self._folder.opened
        self._records = Records(self._folder.entries, record_max=record_max)
        self._note: Note = lambda sentence: note(f"{folder}: {sentence}")
        self._writer = Writer(self._folder.slab, self._folder.catalogue, self._records, self._note)
        self._lock = self._writer.lock
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ess-disk-reader")
        self._loaded_count = self._damaged_count = 0
        self._load_s = 0.0

    # ---- pages that are here

    def __contains__(self, content: bytes) -> bool:
        with self._lock:
            return content in self._records

    def leading_count(self, contents: Sequence[bytes]) -> int:
        """How many leading texts of `contents` are here."""
        with self._lock:
            return len(self._records.leading(contents))

    def claim(self, contents: Sequence[bytes]) -> Claim:
        """Keeps the leading pages until the claim is released, and marks them as used now."""
        with self._lock:
            held = tuple(self._records.leading(contents))
            self._records.use(reversed(held))
            self._records.hold(held)
        return Claim(self, held)

    def use(self, contents: Iterable[bytes]) -> None:
        """Marks those of `contents` that are here as used now, the last of them last."""
        with self._lock:
            self._records.use(contents)

    def release(self, contents: Iterable[bytes]) -> None:
        with self._lock:
            self._records.drop(contents)

    def load(self, content: bytes, parts: Parts) -> bool:
        """Reads the page into `parts`, in any thread. False where it is not here or not whole;
        `parts` may then hold anything."""
        began_s = time.monotonic()
        with self._lock:
            entry = self._records.find(content)
        if entry is None:
            return False
        try:
            is_read = self._folder.slab.read(entry.record, parts)
        except OSError:
            is_read = False
        is_whole = is_read and checksum(content, parts) == entry.crc
        with self._lock:
            self._load_s += time.monotonic() - began_s
            self._loaded_count += is_whole
            is_damaged = not is_whole and self._records.find(content) is entry
            if is_damaged:
                self._damaged_count += 1
                self._writer.remove(entry)
            count = self._damaged_count
        if is_damaged and count & (count - 1) == 0:
            self._note(f"{_damaged(count)} on the disk so far; prompts compute them again")
        return is_whole

    def loading(self, contents: Sequence[bytes], parts_of: Callable[[int], Parts]) -> Loading:
        """A loading of these pages, the first of `contents` first, to where `parts_of` says; it has
        yet to `begin`."""

        def load(first: int) -> int:
            last = min(first + READ_MAX, len(contents))
            for place in range(first, last):
                if not self.load(contents[place], parts_of(place)):
                    return place - first
            return last - first

        jobs = [partial(load, first) for first in range(0, len(contents), READ_MAX)]
        return Loading(self._readers.submit, jobs)

    # ---- pages that come and go

    def store(self, content: bytes, copy: Copy) -> None:
        """Queues a page; another thread calls `copy`, soon, late or never."""
        with self._lock:
            if content in self._records:
                self._records.use([content])
            else:
                self._writer.add(content, copy)

    def lose(self, contents: Iterable[bytes]) -> None:
        """These texts' pages are about to hold other texts: drops those not yet stored."""
        with self._lock:
            for content in contents:
                self._writer.lose(content)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until the queue is on the disk; False if that takes longer than `timeout_s`."""
        return self._writer.flush(timeout_s)

    def forget(self) -> int:
        """Forgets all pages and returns their count. Waits for the disk. Later starts do not find
        them either, unless the disk takes no changes any more."""
        with self._lock:
            if self._records.is_held:
                raise BadState("pages on disk are held by sequences that wait there")
            self._writer.clear_queue()
        self._writer.flush()
        with self._lock:
            count = len(self._records)
            self._writer.remove_all()
        with suppress(OSError):
            self._folder.slab.keep(0)
        self._writer.flush()
        return count

    # ---- the whole of it

    @property
    def uses(self) -> DiskUse:
        with self._lock:
            return DiskUse(
                page_count=len(self._records),
                page_max=self._records.record_max,
                page_bytes=self.page_bytes,
                queue_count=self._writer.queue_count,
                stored_count=self._writer.stored_count,
                dropped_count=self._writer.dropped_count,
                loaded_count=self._loaded_count,
                damaged_count=self._damaged_count,
                store_s=self._writer.seconds,
                load_s=self._load_s,
                fault=self._writer.fault,
            )

    def check(self) -> None:
        self.flush()
        with self._lock:
            self._writer.check()

    def close(self) -> None:
        """Stores queued pages for some seconds; drops the rest."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.flush(CLOSE_S)
        self._writer.end()
        self._folder.close()


class Holder(Protocol):
    def release(self, contents: Iterable[bytes]) -> None: ...


class Claim:
    """Pages that stay on disk until `release`."""

    def __init__(self, tier: Holder, contents: tuple[bytes, ...]) -> None:
        self.contents = contents
        self._tier = tier

    def keep(self, count: int) -> None:
        """Keeps the first `count` pages, releases the others."""
        self._tier.release(self.contents[count:])
        self.contents = self.contents[:count]

    def release(self) -> None:
        """A second call does nothing."""
        self.keep(0)


class Loading:
    """Pages on their way to memory, several readers at once. Its owner has it before it begins, so
    that it can be cancelled whatever happens meanwhile."""

    def __init__(self, submit: Submit, jobs: Sequence[Callable[[], int]]) -> None:
        self.runs = [Future[int]() for _ in jobs]
        self._submit = submit
        self._jobs = jobs

    def begin(self) -> None:
        """After an error some pages may be on their way: a pool of threads that cannot start one
        raises, and has the job in its queue."""
        for run, job in zip(self.runs, self._jobs, strict=True):
            self._submit(_fulfil, run, job)

    @property
    def is_done(self) -> bool:
        return all(run.done() for run in self.runs)

    def wait(self) -> None:
        for run in self.runs:
            if not run.cancelled():
                run.result()

    def cancel(self) -> None:
        """Stops the readers and waits for the pages that they have begun; afterwards no page is
        written into memory."""
        for run in self.runs:
            run.cancel()
        self.wait()

    @property
    def count(self) -> int:
        """How many leading pages came whole; to be read when `is_done`."""
        count = 0
        for run in self.runs:
            assert run.done(), "pages are still on their way"
            count += 0 if run.cancelled() else run.result()
            if run.cancelled() or run.result() < READ_MAX:
                break
        return count


def _fulfil(run: Future[int], load: Callable[[], int]) -> None:
    if run.set_running_or_notify_cancel():
        try:
            run.set_result(load())
        except BaseException as error:
            run.set_exception(error)


def _damaged(count: int) -> str:
    return "1 page was damaged" if count == 1 else f"{count:,} pages were damaged"
