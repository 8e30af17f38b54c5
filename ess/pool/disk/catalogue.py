"""Which text lies in which record: a SQLite file. A transaction is on the disk when it returns.

Only the catalogue leads to a record. So a row is deleted before its record is overwritten, and
written after the record's bytes are on the disk: at every moment each row names bytes that were
stored under its hash, or bytes that their checksum refuses.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VERSION: Final = 1
USED_MAX: Final = 1 << 62
LOCKED_S: Final = 5.0
"""How long a program that has locked the catalogue is waited for."""
KEY: Final = "what these pages are of"

ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""SQLite's errors; their messages may quote damaged bytes, which Python cannot decode then."""

_OF_THE_DISK: Final = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
)
"""Errors that a whole catalogue has on a disk that is full or fails, or beside a program that has
locked it."""

_TABLES: Final = """
CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE pages (
    content BLOB PRIMARY KEY, record INTEGER UNIQUE, size INTEGER, crc INTEGER, used INTEGER
) WITHOUT ROWID;
"""


class Unusable(Exception):
    """The catalogue cannot be used, and a new one may take its place; the message is a clause that
    says why."""


class Unreadable(Exception):
    """The catalogue may be whole, but cannot be read now; the message is a clause that says why."""


@dataclass(slots=True, eq=False)
class Entry:
    """The record of a text. `used` grows with every use of any text."""

    content: bytes
    record: int
    crc: int
    used: int


class Catalogue:
    """The open SQLite file, for one thread at a time."""

    def __init__(self, path: Path, *, identity: bytes, page_bytes: int) -> None:
        """Creates the file if there is none; Unusable if it is damaged or of something else."""
        self._page_bytes = page_bytes
        is_new = not path.exists()
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._base = sqlite3.connect(
                path, timeout=LOCKED_S, isolation_level=None, check_same_thread=False
            )
        except ERRORS as error:
            raise _wrong(error) from error
        try:
            self._open(is_new=is_new, identity=VERSION.to_bytes(4, "little") + identity)
        except ERRORS as error:
            self._base.close()
            raise _wrong(error) from error
        except Unusable:
            self._base.close()
            raise

    def _open(self, *, is_new: bool, identity: bytes) -> None:
        """The folder is this process's alone. So the file is locked for good, and SQLite needs no
        memory file beside it, for which a full disk would have no room."""
        base = self._base
        base.execute("PRAGMA locking_mode=EXCLUSIVE")
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=FULL")
        if is_new:
            base.executescript(f"BEGIN; {_TABLES} COMMIT;")
            base.execute("INSERT INTO about VALUES (?, ?)", (KEY, identity))
            return
        verdict = base.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise Unusable(f"its catalogue is damaged ({verdict.splitlines()[-1]})")
        row = base.execute("SELECT value FROM about WHERE name = ?", (KEY,)).fetchone()
        if row is None or row[0] != identity:
            raise Unusable("its pages are of another model, row form, layout or version")

    def entries(self, record_max: int) -> list[Entry]:
        """Entries in the first `record_max` records, the longest unused first; deletes the other
        rows. Unusable where rows contradict one another."""
        query = "SELECT content, record, crc, used, size FROM pages ORDER BY used"
        try:
            rows = self._base.execute(query).fetchall()
            good = [Entry(*row[:4]) for row in rows if self._is_good(row, record_max)]
            kept = {entry.content for entry in good}
            self.change(gone=[row[0] for row in rows if row[0] not in kept])
        except (*ERRORS, TypeError) as error:
            raise _wrong(error) from error
        if len({entry.record for entry in good}) != len(good):
            raise Unusable("its catalogue is damaged (two texts in one record)")
        return good

    def _is_good(self, row: tuple[bytes, int, int, int, int], record_max: int) -> bool:
        is_whole = all(isinstance(number, int) for number in row[1:]) and isinstance(row[0], bytes)
        return (
            is_whole
            and 0 <= row[1] < record_max
            and row[4] == self._page_bytes
            and row[3] < USED_MAX
        )

    def change(
        self,
        *,
        gone: Iterable[bytes] = (),
        come: Sequence[Entry] = (),
        used: Sequence[Entry] = (),
    ) -> None:
        """Makes one transaction, on the disk at return; after one of ERRORS nothing has changed."""
        lost = [(content,) for content in gone]
        if not (lost or come or used):
            return
        base, size = self._base, self._page_bytes
        rows = [(entry.content, entry.record, size, entry.crc, entry.used) for entry in come]
        uses = [(entry.used, entry.content) for entry in used]
        base.execute("BEGIN IMMEDIATE")
        try:
            base.executemany("DELETE FROM pages WHERE content = ?", lost)
            base.executemany("INSERT INTO pages VALUES (?, ?, ?, ?, ?)", rows)
            base.executemany("UPDATE pages SET used = ? WHERE content = ?", uses)
            base.execute("COMMIT")
        except ERRORS:
            if base.in_transaction:
                base.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._base.close()


def _wrong(error: Exception) -> Unusable | Unreadable:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK:
        return Unreadable(f"its catalogue cannot be read now ({error})")
    return Unusable(f"its catalogue is damaged ({error})")
