"""What this process may still take of the machine and of its control group: memory and cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Limit and use of a control group as a container sees its own: version 2, then version 1.
MEMORY_GROUPS: Final = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "sys/fs/cgroup/memory/memory.stat",
    ),
)

# Microseconds of processor time in each period, and the period, as a container sees its own group:
# version 2 has both in one file, version 1 in two.
CORE_GROUPS: Final = (
    ("sys/fs/cgroup/cpu.max",),
    ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def memory_free(root: Path = Path("/")) -> int:
    """Bytes available now without taking them from other processes."""
    return min(
        [_memory_of_machine(root), *(_memory_of_group(root, *names) for names in MEMORY_GROUPS)]
    )


def _memory_of_machine(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_of_group(root: Path, limit: str, use: str, stat: str) -> int:
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


def cores_free(root: Path = Path("/")) -> int:
    """At least one. A share of a core is none: threads beyond the quota stop all of them."""
    return max(1, min([_allowed(), *(_cores_of_group(root, names) for names in CORE_GROUPS)]))


def _allowed() -> int:
    """Cores that the system may run this process on; not every system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cores_of_group(root: Path, names: Sequence[str]) -> int:
    """Whole cores of the group's quota; unlimited without one."""
    try:
        words = " ".join((root / name).read_text() for name in names).split()
        quota, period = (int(word) for word in words)
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return 1 << 30
    return quota // period if quota > 0 < period else 1 << 30
