"""Which text lies in which record: a SQLite file. A transaction is on the disk when it returns.

Only the catalogue leads to a record. So a row is deleted before its record is overwritten, and
written after the record's bytes are on the disk: at every moment each row names bytes that were
stored under its hash, or bytes that their checksum refuses.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VERSION: Final = 1
USED_MAX: Final = 1 << 62
KEY: Final = "what these pages are of"

ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""SQLite's errors; their messages may quote damaged bytes, which Python cannot decode then."""

_TABLES: Final = """
CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE pages (
    content BLOB PRIMARY KEY, record INTEGER UNIQUE, size INTEGER, crc INTEGER, used INTEGER
) WITHOUT ROWID;
"""


class Unusable(Exception):
    """The catalogue cannot be used; the message is a clause that says why."""


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
        path.touch(mode=0o600)
        self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._open(is_new=is_new, identity=VERSION.to_bytes(4, "little") + identity)
        except ERRORS as error:
            self._base.close()
            raise Unusable(f"its catalogue is damaged ({error})") from error
        except Unusable:
            self._base.close()
            raise

    def _open(self, *, is_new: bool, identity: bytes) -> None:
        base = self._base
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
            raise Unusable(f"its catalogue is damaged ({error})") from error
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

    def clear(self) -> None:
        self._base.execute("DELETE FROM pages")

    def close(self) -> None:
        self._base.close()
