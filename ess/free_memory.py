"""How much more memory this process may take, of the machine and of its control group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

# Limit and use of a control group as a container sees its own: version 2, then version 1.
GROUPS: Final = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
    ),
)


def memory_free(root: Path = Path("/")) -> int:
    """Bytes available now without taking them from other processes."""
    return min([_of_machine(root), *(_of_group(root, *names) for names in GROUPS)])


def _of_machine(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group(root: Path, limit: str, use: str, stat: str) -> int:
    """Bytes left in the group; unlimited without one. Its droppable file pages count as free."""
    try:
        most = (root / limit).read_text().strip()
        if most == "max":
            return 1 << 62
        used = int((root / use).read_text())
        lines = (root / stat).read_text().splitlines()
        dropped = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return max(0, int(most) - used + dropped)
    except (OSError, ValueError):
        return 1 << 62
