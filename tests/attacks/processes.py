"""What /proc says of processes: who is below whom, how large, and whether they go on."""

from __future__ import annotations

import contextlib
import os
import re
import select
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
GONE = (FileNotFoundError, ProcessLookupError)


def children(process: int) -> list[int]:
    """Of all its threads."""
    found = []
    with contextlib.suppress(*GONE):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def kin(process: int) -> list[int]:
    """All processes below it."""
    return [below for child in children(process) for below in (child, *kin(child))]


def peak_bytes(process: int) -> int:
    """The most that it has held since `forget_peak`, or ever."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10


def forget_peak(process: int) -> None:
    Path(f"/proc/{process}/clear_refs").write_text("5")


def resident_bytes(process: int) -> int:
    """0 if it has ended."""
    with contextlib.suppress(*GONE):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    return 0


def birth(process: int) -> int:
    """Its start in ticks, which tells it from a later process of this number; 0 if it has ended.

    A process that has ended and that nobody has waited for has ended.
    """
    with contextlib.suppress(*GONE):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0


def wait_for_end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        file = os.pidfd_open(process)
        ended, _, _ = select.select([file], [], [], 30.0)
        os.close(file)
        assert ended, f"process {process} goes on"
