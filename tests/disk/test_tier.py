"""The disk tier by itself: what it finds again, what it forgets, what it never serves."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ess.errors import BadInput, BadState, Unavailable
from ess.pool.disk import catalogue, writer
from ess.pool.disk.catalogue import Catalogue, Entry
from ess.pool.disk.folder import CATALOGUE, LOCK, SLAB
from ess.pool.disk.tier import DiskTier
from tests.disk.bytes_of import (
    IDENTITY,
    PAGE_BYTES,
    content,
    copies,
    fill,
    loaded,
    page_of,
    texts,
    tier,
)
from tests.disk.kills import rounds
from tests.support.forked import ROOT


@pytest.fixture
def made(tmp_path: Path) -> Iterator[DiskTier]:
    opened = tier(tmp_path)
    yield opened
    opened.check()
    opened.close()


def test_what_was_stored_loads_and_nothing_else(made: DiskTier, tmp_path: Path) -> None:
    fill(made, range(10))
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}, "others may read"
    assert all(loaded(made, text) for text in texts(range(10)))
    assert not loaded(made, content(10))
    assert made.leading_count(texts(range(12))) == 10
    assert made.leading_count([content(11), content(0)]) == 0
    assert made.uses.stored_count == 10
    assert made.uses.loaded_count == 10
    assert made.uses.load_s > 0


def test_the_next_process_finds_the_pages(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.disk.bytes_of import *; "
        "t = tier(Path({!r})); fill(t, range(9)); t.close()"
    )
    subprocess.run([sys.executable, "-c", code.format(str(tmp_path))], cwd=ROOT, check=True)
    made = tier(tmp_path)
    assert made.opened == ""
    assert all(loaded(made, text) for text in texts(range(9)))
    made.close()


def test_a_capacity_may_be_written_and_other_arguments_are_refused_by_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {"identity": b"", "page_bytes": 5000, "capacity_bytes": "64MiB"}
    made = DiskTier(tmp_path, **given)
    assert made.uses.page_max == (64 << 20) // 8192
    made.close()
    wrong = {"identity": "x", "page_bytes": "5k", "capacity_bytes": 1e9}
    for name, value in wrong.items():
        with pytest.raises(BadInput, match=f"{name}.*{value}"):
            DiskTier(tmp_path, **{**given, name: value})
    with pytest.raises(BadInput, match="page_bytes is 0, must be a layout's host_page_bytes"):
        DiskTier(tmp_path, **{**given, "page_bytes": 0})


def test_it_is_bounded_and_the_one_used_longest_ago_gives_way(made: DiskTier) -> None:
    fill(made, range(24))
    made.use([content(0)])
    made.store(content(1), copies(content(1)))
    fill(made, range(24, 30))
    here = [number for number in range(30) if content(number) in made]
    assert len(here) == 24
    assert {0, 1} <= set(here), "a page that was used, or stored again, just now gave way"
    assert set(range(24, 30)) <= set(here)


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    made = tier(tmp_path)
    fill(made, range(24))
    made.use([content(5)])
    made.close()
    again = tier(tmp_path)
    fill(again, range(24, 47))
    assert content(5) in again
    assert again.uses.page_count == 24
    again.close()


def test_of_a_batch_the_first_page_stays_longest_also_behind_a_kill(tmp_path: Path) -> None:
    """A prompt's first page comes first; without it no other is found."""
    made = tier(tmp_path / "killed")
    with made._lock:
        for number in range(24):
            made.store(content(number), copies(content(number)))
    made.flush()
    shutil.copytree(tmp_path / "killed", tmp_path / "left")
    made.close()
    again = tier(tmp_path / "left")
    fill(again, range(24, 36))
    assert [number for number in range(24) if content(number) in again] == [*range(12)]
    again.close()


def test_a_larger_tier_does_not_make_the_file_larger(tmp_path: Path) -> None:
    made = tier(tmp_path)
    fill(made, range(3))
    made.close()
    size = (tmp_path / SLAB).stat().st_size
    again = tier(tmp_path, pages=48)
    assert (tmp_path / SLAB).stat().st_size == size
    again.close()


def test_a_page_comes_in_pieces(made: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call to the kernel ends within a part."""
    fill(made, range(2))
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: read(file, [parts[0][:700]], at))
    assert all(loaded(made, text) for text in texts(range(2)))


def test_a_claimed_page_does_not_give_way(made: DiskTier) -> None:
    fill(made, range(24))
    claim = made.claim(texts(range(20)))
    fill(made, range(24, 48))
    assert made.leading_count(texts(range(20))) == 20
    with pytest.raises(BadState, match="held by sequences"):
        made.forget()
    claim.release()
    fill(made, range(48, 72))
    assert made.leading_count(texts(range(20))) == 0


def test_a_smaller_tier_keeps_what_fits(tmp_path: Path) -> None:
    made = tier(tmp_path)
    fill(made, range(24))
    made.close()
    size = (tmp_path / SLAB).stat().st_size
    again = tier(tmp_path, pages=6)
    assert again.uses.page_count == 6
    assert (tmp_path / SLAB).stat().st_size < size
    assert sum(loaded(again, text) for text in texts(range(24))) == 6
    again.check()
    fill(again, range(24))
    assert again.uses.fault == "", "the catalogue had kept a page that the tier has no record for"
    again.close()
    with pytest.raises(BadInput, match="prefix_cache_disk is 0 B"):
        tier(tmp_path, pages=0)


def test_a_change_of_the_catalogue_that_fails_changes_nothing_and_is_over(tmp_path: Path) -> None:
    made = Catalogue(tmp_path / CATALOGUE, identity=IDENTITY, page_bytes=PAGE_BYTES)
    one, two, three = (Entry(content(number), number // 2, 7, number) for number in (1, 2, 3))
    made.change(come=[one])
    with pytest.raises(sqlite3.IntegrityError):
        made.change(gone=[one.content], come=[two, three])
    made.change(come=[two])
    assert [entry.content for entry in made.entries(2)] == [one.content, two.content]
    made.close()


def test_a_page_that_was_another_text_before_it_was_copied_is_dropped(made: DiskTier) -> None:
    made.store(content(1), lambda page: False)
    fill(made, range(2, 4))
    assert content(1) not in made
    assert made.uses.dropped_count == 1


def test_what_was_lost_before_its_turn_is_not_written(made: DiskTier) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(page: np.ndarray) -> bool:
        begun.set()
        go_on.wait()
        return copies(content(0))(page)

    made.store(content(0), slow)
    begun.wait()
    made.store(content(1), copies(content(1)))
    made.lose([content(1)])
    go_on.set()
    made.flush()
    assert content(0) in made
    assert content(1) not in made
    assert made.uses.dropped_count == 1


def test_a_full_queue_drops_and_counts(made: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "QUEUE_MAX", 2)
    begun, go_on = threading.Event(), threading.Event()

    def slow(page: np.ndarray) -> bool:
        begun.set()
        return go_on.wait() and copies(content(0))(page)

    made.store(content(0), slow)
    begun.wait()
    for number in range(1, 6):
        made.store(content(number), copies(content(number)))
    assert made.uses.queue_count == 2
    assert made.uses.dropped_count == 3
    go_on.set()


def test_a_broken_page_is_dropped_counted_and_never_served(tmp_path: Path) -> None:
    notes: list[str] = []
    made = tier(tmp_path, note=notes.append)
    fill(made, range(4))
    with (tmp_path / SLAB).open("r+b") as slab:
        slab.seek(777)
        slab.write(b"\0" * 64)
    here = [loaded(made, text) for text in texts(range(4))]
    assert here.count(False) == 1
    assert made.uses.damaged_count == 1
    [said] = notes
    assert said.startswith(f"{tmp_path}: 1 page was damaged on the disk so far; ")
    fill(made, range(4))
    assert all(loaded(made, text) for text in texts(range(4)))
    made.check()
    made.close()


def test_a_load_counts_the_leading_pages_that_came(made: DiskTier) -> None:
    fill(made, range(20))
    pages = np.zeros((20, PAGE_BYTES), np.uint8)
    loading = made.loading(texts(range(20)), lambda place: [pages[place]])
    loading.begin()
    loading.wait()
    assert loading.is_done
    assert loading.count == 20
    assert all((pages[n] == page_of(content(n))).all() for n in range(20))
    asked = [*texts(range(11)), content(99), *texts(range(12, 20))]
    loading = made.loading(asked, lambda place: [pages[place]])
    loading.begin()
    loading.wait()
    assert loading.count == 11


def test_forgetting_empties_it_for_good(tmp_path: Path) -> None:
    made = tier(tmp_path)
    fill(made, range(10))
    assert made.forget() == 10
    assert (tmp_path / SLAB).stat().st_size == 0
    assert made.leading_count(texts(range(10))) == 0
    fill(made, range(3))
    assert loaded(made, content(2))
    made.forget()
    made.close()
    again = tier(tmp_path)
    assert again.uses.page_count == 0
    again.close()


def test_pages_of_something_else_are_not_found(tmp_path: Path) -> None:
    made = tier(tmp_path)
    fill(made, range(3))
    made.close()
    other = tier(tmp_path, identity=b"another model")
    assert "starts empty" in other.opened
    assert "another model, row form, layout or version" in other.opened
    assert other.uses.page_count == 0
    other.close()


def no_catalogue(before: bytes) -> bytes:
    return b"no catalogue at all" * 500


def a_name_in_no_encoding(before: bytes) -> bytes:
    """SQLite quotes the name of the table in what it says."""
    spoilt = before.replace(b"tablepagespages", b"tablep\xe7\xe7\xe7\xe7pages")
    assert spoilt != before
    return spoilt


@pytest.mark.parametrize("spoilt", [no_catalogue, a_name_in_no_encoding])
def test_a_damaged_catalogue_starts_empty(spoilt: Callable[[bytes], bytes], tmp_path: Path) -> None:
    made = tier(tmp_path)
    fill(made, range(3))
    made.close()
    catalogue = tmp_path / CATALOGUE
    catalogue.write_bytes(spoilt(catalogue.read_bytes()))
    again = tier(tmp_path)
    assert "its catalogue is damaged" in again.opened
    assert "\n" not in again.opened
    fill(again, range(3))
    assert loaded(again, content(1))
    again.close()


def test_a_folder_is_of_one_process(made: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(BadState, match=r"is in use by process \d+: every engine needs a folder"):
        tier(tmp_path)


@pytest.mark.parametrize("name", ["", LOCK, SLAB, CATALOGUE])
def test_what_is_no_folder_or_no_file_is_refused(name: str, tmp_path: Path) -> None:
    """And nothing of it stays open."""
    (tmp_path / "made").mkdir()
    if name:
        (tmp_path / "made" / name).mkdir()
    folder = tmp_path / "made" if name else tmp_path / "file"
    (tmp_path / "file").write_text("")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Unavailable, match="cannot keep pages"):
        tier(folder)
    assert os.listdir("/proc/self/fd") == before


def test_a_path_too_long_for_a_catalogue_is_refused(tmp_path: Path) -> None:
    """SQLite takes shorter paths than the system."""
    for _ in range(2):
        with pytest.raises(Unavailable, match="its catalogue cannot be read now"):
            tier(tmp_path / "/".join(["d" * 200] * 5))


def test_a_catalogue_that_another_program_has_locked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "LOCKED_S", 0.0)
    made = tier(tmp_path)
    fill(made, range(3))
    made.close()
    other = sqlite3.connect(tmp_path / CATALOGUE, isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(Unavailable, match=r"cannot be read now \(database is locked\)"):
        tier(tmp_path)
    other.close()
    again = tier(tmp_path)
    assert again.opened == ""
    assert all(loaded(again, text) for text in texts(range(3)))
    again.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_start_on_a_full_disk_finds_the_pages(*, is_killed: bool, tmp_path: Path) -> None:
    """Also where SQLite's log has to be read."""
    made = tier(tmp_path / "before")
    fill(made, range(3))
    if is_killed:
        shutil.copytree(tmp_path / "before", tmp_path / "left")
    made.close()
    folder = tmp_path / ("left" if is_killed else "before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        again = tier(folder)
        assert again.opened == ""
        assert all(loaded(again, text) for text in texts(range(3)))
        fill(again, range(3, 6))
        assert again.uses.fault.startswith("the disk takes no more pages: ")
        again.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = tier(folder)
    assert all(loaded(again, text) for text in texts(range(3)))
    again.close()


def test_a_folder_that_is_removed_ends_storing_and_nothing_else(tmp_path: Path) -> None:
    notes: list[str] = []
    made = tier(tmp_path / "pages", note=notes.append)
    fill(made, range(6))
    shutil.rmtree(tmp_path / "pages")
    fill(made, range(6, 12))
    [note] = notes
    assert note.startswith(f"{tmp_path}/pages: the disk takes no more pages: its file was removed;")
    assert [loaded(made, text) for text in texts(range(12))] == [True] * 6 + [False] * 6
    again = tier(tmp_path / "pages")
    fill(again, range(3))
    made.forget()
    for each in (made, again):
        each.check()
        each.close()


def test_stores_and_loads_at_once_never_mix(made: DiskTier) -> None:
    stop = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(sum(loaded(made, text) for text in texts(range(60))))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for first in range(0, 240, 20):
        fill(made, range(first % 60, first % 60 + 20))
    stop.set()
    for reader in readers:
        reader.join()
    assert made.uses.damaged_count == 0 or made.uses.stored_count > 24
    made.check()


def test_killed_and_damaged_it_never_serves_a_wrong_page(tmp_path: Path) -> None:
    told = rounds(tmp_path, count=6, seed=3)
    assert told.kept > 0


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path: Path) -> None:
    assert rounds(tmp_path, count=40, seed=4).rounds == 40
