"""What the system says of memory files that a process has mapped, and of its share in each.

A page that n processes have mapped counts 1/n in the share of each (PSS). So the shares of a file
that lies in memory once add up to its pages, in whichever processes it is mapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEAD: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s*(.*)")
_KIB: Final = re.compile(r"(Rss|Pss): +(\d+) kB")


@dataclass(slots=True)
class Mapping:
    """`access` is as in /proc: rw-s, r--s for reading, ...-p for memory of the process alone."""

    file: str
    inode: int
    access: str
    byte_count: int
    resident_bytes: int = 0
    share_bytes: int = 0


def mappings(pid: int) -> list[Mapping]:
    """OSError if the process has ended. The system walks all its pages for this."""
    return list(_read(Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines()))


def _read(lines: Iterable[str]) -> Iterator[Mapping]:
    mapping = None
    for line in lines:
        if head := _HEAD.fullmatch(line):
            begin, end, access, inode, file = head.groups()
            if mapping is not None:
                yield mapping
            mapping = Mapping(file, int(inode), access, int(end, 16) - int(begin, 16))
        elif mapping is not None and (said := _KIB.fullmatch(line)):
            byte_count = int(said[2]) << 10
            if said[1] == "Rss":
                mapping.resident_bytes = byte_count
            else:
                mapping.share_bytes = byte_count
    if mapping is not None:
        yield mapping
