"""Which record holds which text, which was used longest ago, which must stay: bookkeeping only.

A record is free, or taken by a batch that is being written, or holds a text, or is leaving: its
text can no longer be found, and the catalogue must forget it before the record is free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from ess.pool.disk.catalogue import Entry


class Records:
    """The tier's lock guards it. `uses` are the entries used since the catalogue was last told."""

    def __init__(self, entries: Iterable[Entry], *, record_max: int) -> None:
        """`entries`: the longest unused first."""
        self.record_max = record_max
        self.uses: dict[bytes, Entry] = {}
        self._entries = OrderedDict((entry.content, entry) for entry in entries)
        self._holds: Counter[bytes] = Counter()
        taken = {entry.record for entry in self._entries.values()}
        self._first_new = max(taken, default=-1) + 1
        self._free = [record for record in reversed(range(self._first_new)) if record not in taken]
        self._used = max((entry.used for entry in self._entries.values()), default=0)
        assert self._first_new <= record_max, f"record {self._first_new - 1} of {record_max}"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, content: bytes) -> bool:
        return content in self._entries

    @property
    def is_held(self) -> bool:
        return bool(self._holds)

    def find(self, content: bytes) -> Entry | None:
        return self._entries.get(content)

    def leading(self, contents: Sequence[bytes]) -> Sequence[bytes]:
        """The longest prefix of `contents` whose texts all have records."""
        for count, content in enumerate(contents):
            if content not in self._entries:
                return contents[:count]
        return contents

    def use(self, contents: Iterable[bytes]) -> None:
        """Marks these as used now, the last of them last. The deepest page of a prompt comes first
        in `contents`: a page without its parents can never be found again."""
        for content in contents:
            entry = self._entries.get(content)
            if entry is not None:
                self._used += 1
                entry.used = self._used
                self._entries.move_to_end(content)
                self.uses[content] = entry

    def hold(self, contents: Iterable[bytes]) -> None:
        """Adds a hold to each: no other text takes their records."""
        self._holds.update(contents)

    def drop(self, contents: Iterable[bytes]) -> None:
        for content in contents:
            assert self._holds[content] > 0, "a record was dropped more often than held"
            self._holds[content] -= 1
            if not self._holds[content]:
                del self._holds[content]

    def take(self, count: int) -> tuple[list[int], list[Entry]]:
        """Records for at most `count` texts, and the entries that gave up theirs: the longest
        unused without a hold."""
        records = [self._free.pop() for _ in range(min(count, len(self._free)))]
        new_count = min(count - len(records), self.record_max - self._first_new)
        records += range(self._first_new, self._first_new + new_count)
        self._first_new += new_count
        victims: list[Entry] = []
        for content, entry in self._entries.items():
            if len(records) + len(victims) == count:
                break
            if content not in self._holds:
                victims.append(entry)
        for entry in victims:
            self.remove(entry)
        return [*records, *(entry.record for entry in victims)], victims

    def remove(self, entry: Entry) -> None:
        """Its text cannot be found from now on; its record stays taken."""
        del self._entries[entry.content]
        self.uses.pop(entry.content, None)

    def remove_all(self) -> list[Entry]:
        assert not self._holds, f"{len(self._holds)} records are held"
        removed = [*self._entries.values()]
        self._entries.clear()
        self.uses.clear()
        return removed

    def stamp(self, entries: Iterable[Entry]) -> None:
        """Marks new entries as used now, the last of them last."""
        for entry in entries:
            self._used += 1
            entry.used = self._used

    def add(self, entry: Entry) -> None:
        """Adds an entry whose page lies in its record."""
        assert entry.content not in self._entries, "a text has two records"
        self._entries[entry.content] = entry
        self.use([entry.content])

    def put_back(self, records: Iterable[int]) -> None:
        """Frees taken records that hold no text."""
        self._free += records

    def check(self, *, taken_count: int) -> None:
        """Audits; `taken_count` records are taken without a text: being written, or leaving."""
        numbers = [entry.record for entry in self._entries.values()] + self._free
        assert len(set(numbers)) == len(numbers), "a record is twice in use"
        assert all(0 <= number < self._first_new for number in numbers), "a record out of range"
        assert self._first_new <= self.record_max, f"{self._first_new} of {self.record_max} records"
        assert len(numbers) + taken_count == self._first_new, "a record is lost"
        used = [entry.used for entry in self._entries.values()]
        assert used == sorted(used), "the order of use is not the order of the uses"
        assert all(self._entries.get(name) is entry for name, entry in self.uses.items()), "a ghost"
