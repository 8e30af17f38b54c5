"""How many cores this process may keep busy: of the machine, and of its control group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Microseconds of processor time in each period, and the period, as a container sees its own group:
# version 2 has both in one file, version 1 in two.
GROUPS: Final = (
    ("sys/fs/cgroup/cpu.max",),
    ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def cores_free(root: Path = Path("/")) -> int:
    """At least one. A share of a core is none: threads beyond the quota stop all of them."""
    return max(1, min([_allowed(), *(_of_group(root, names) for names in GROUPS)]))


def _allowed() -> int:
    """Cores that the system may run this process on; not every system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _of_group(root: Path, names: Sequence[str]) -> int:
    """Whole cores of the group's quota; unlimited without one."""
    try:
        words = " ".join((root / name).read_text() for name in names).split()
        quota, period = (int(word) for word in words)
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return 1 << 30
    return quota // period if quota > 0 < period else 1 << 30
