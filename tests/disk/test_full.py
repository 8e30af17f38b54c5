"""Disks that are full, broken or read-only: they take no pages, and all else goes on."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ess.pool.disk import writer
from tests.disk.bytes_of import PAGE_BYTES, content, copies, fill, loaded, texts, tier


def fails_with(number: int) -> Callable[..., NoReturn]:
    def fails(*given: object, **told: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fails


def test_a_full_disk_ends_storing_and_nothing_else(tmp_path: Path) -> None:
    notes: list[str] = []
    made = tier(tmp_path, note=notes.append)
    fill(made, range(6))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (7 * PAGE_BYTES, before[1]))
    try:
        fill(made, range(6, 12))
        assert made.uses.fault == f"the disk takes no more pages: {os.strerror(errno.EFBIG)}"
        [note] = notes
        assert note.startswith(f"{tmp_path}: {made.uses.fault}; those it has are read on, and")
        made.store(content(20), copies(content(20)))
        assert made.flush(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert made.uses.dropped_count >= 1
    assert all(loaded(made, text) for text in texts(range(6)))
    made.check()
    made.close()
    again = tier(tmp_path)
    assert all(loaded(again, text) for text in texts(range(6)))
    again.close()


@pytest.mark.parametrize("fails_first", ["pages", "gone", "come"])
def test_a_full_disk_with_room_again_stores_again(
    fails_first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again after a while only, and has lost none of its records: neither free ones nor
    those of the texts that were to give way."""
    notes: list[str] = []
    made = tier(tmp_path, pages=6, note=notes.append)
    fill(made, range(5))
    change = made._folder.catalogue.change

    def full(**told: Any) -> None:
        if told.get(fails_first):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        change(**told)

    with monkeypatch.context() as patched:
        if fails_first == "pages":
            patched.setattr(os, "pwrite", fails_with(errno.ENOSPC))
        patched.setattr(made._folder.catalogue, "change", full)
        fill(made, range(5, 9))
        assert made.uses.fault.startswith("the disk takes no more pages: ")
    fill(made, range(9, 11))
    assert not any(loaded(made, text) for text in texts(range(5, 11)))
    monkeypatch.setattr(made._writer, "_again_s", 0.0)
    fill(made, range(11, 12))
    fill(made, range(12, 17))
    assert made.uses.fault == ""
    assert [loaded(made, text) for text in texts(range(17))] == [False] * 11 + [True] * 6
    refused, stores = notes
    assert refused.endswith("those it has are read on, and it is tried again every 60 s")
    assert stores == f"{tmp_path}: the disk takes pages again"
    made.check()
    made.close()
    again = tier(tmp_path, pages=6)
    assert all(loaded(again, text) for text in texts(range(11, 17)))
    again.close()


def test_a_disk_that_stays_full_goes_on_with_the_pages_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try takes the record of the text that gave way to the first."""
    monkeypatch.setattr(writer, "AGAIN_S", 0.0)
    made = tier(tmp_path, pages=6)
    fill(made, range(6))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fails_with(errno.ENOSPC))
        for number in range(6, 12):
            fill(made, range(number, number + 1))
    assert sum(loaded(made, text) for text in texts(range(6))) == 5
    assert not any(loaded(made, text) for text in texts(range(6, 12)))
    assert made.uses.dropped_count == 6
    made.check()
    made.close()


def test_a_full_disk_that_breaks_stores_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it is full as well, behind that."""
    notes: list[str] = []
    monkeypatch.setattr(writer, "AGAIN_S", 0.0)
    made = tier(tmp_path, pages=6, note=notes.append)
    with monkeypatch.context() as patched:
        for number, code in enumerate((errno.ENOSPC, errno.EIO)):
            patched.setattr(os, "pwrite", fails_with(code))
            fill(made, range(number, number + 1))
        patched.setattr(made._folder.catalogue, "change", fails_with(errno.ENOSPC))
        made.forget()
        made.flush()
    fill(made, range(2, 3))
    assert not any(loaded(made, text) for text in texts(range(3)))
    assert [note.rpartition(", and ")[2] for note in notes] == [
        "it is tried again every 0 s",
        "a restart stores again",
    ]
    made.check()
    made.close()


@pytest.mark.parametrize("fails_first", ["pages", "catalogue"])
def test_a_disk_that_turns_read_only_ends_storing_and_nothing_else(
    fails_first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As file systems do on an error of the device. What is told to be forgotten is not found, and
    comes back with the next process, in which the disk may be written to again."""
    made = tier(tmp_path)
    fill(made, range(6))
    if fails_first == "pages":
        monkeypatch.setattr(os, "pwrite", fails_with(errno.EROFS))
    made._folder.catalogue._base.execute("PRAGMA query_only=ON")
    fill(made, range(6, 12))
    assert made.uses.fault.startswith("the disk takes no more pages: ")
    assert [loaded(made, text) for text in texts(range(12))] == [True] * 6 + [False] * 6
    made.check()
    monkeypatch.setattr(os, "ftruncate", fails_with(errno.EROFS))
    assert made.forget() == 6
    assert not any(loaded(made, text) for text in texts(range(6)))
    made.check()
    made.close()
    monkeypatch.undo()
    again = tier(tmp_path)
    assert all(loaded(again, text) for text in texts(range(6)))
    again.close()
