"""What this process may still take of the machine and of its control group: memory and cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

# Where groups lie, which of a process's groups is meant, and the files of a group: limit, use and
# statistics of memory; microseconds of processor time in each period, and the period, which version
# 2 has in one file. Version 2 of control groups, then version 1.
MEMORY_GROUPS: Final = (
    ("sys/fs/cgroup", "", ("memory.max", "memory.current", "memory.stat")),
    (
        "sys/fs/cgroup/memory",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    ),
)
CORE_GROUPS: Final = (
    ("sys/fs/cgroup", "", ("cpu.max",)),
    ("sys/fs/cgroup/cpu", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
)

UNLIMITED: Final = 1 << 62


def memory_free(root: Path = Path("/")) -> int:
    """Bytes available now without taking them from other processes."""
    groups = [_memory_of_group(*files) for files in _files_of_groups(root, MEMORY_GROUPS)]
    return min([_memory_of_machine(root, "MemAvailable", "SC_AVPHYS_PAGES"), *groups])


def memory_total(root: Path = Path("/")) -> int:
    """Bytes that this process could have if no other took any: of the machine, or of its group."""
    groups = [_limit_of(limit) for limit, _, _ in _files_of_groups(root, MEMORY_GROUPS)]
    return min([_memory_of_machine(root, "MemTotal", "SC_PHYS_PAGES"), *groups])


def _limit_of(limit: Path) -> int:
    """The bytes that a group may have, unlimited without one."""
    try:
        most = limit.read_text().strip()
        return UNLIMITED if most == "max" else int(most)
    except (OSError, ValueError):
        return UNLIMITED


def _files_of_groups(
    root: Path, known: Iterable[tuple[str, str, Sequence[str]]]
) -> Iterator[list[Path]]:
    """The files of this process's group and of each group above it: every limit holds. A container
    sees its own group as the topmost one."""
    for place, controller, names in known:
        folder = root / place
        yield [folder / name for name in names]
        for part in _path_of_group(root, controller):
            folder /= part
            yield [folder / name for name in names]


def _path_of_group(root: Path, controller: str) -> Sequence[str]:
    """Of version 2, which has one tree for all controllers, the controller's name is empty."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return [part for part in path.split("/") if part not in ("", "..")]
    return ()


def _memory_of_machine(root: Path, name: str, pages: str) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _memory_of_group(limit: Path, use: Path, stat: Path) -> int:
    """Bytes left in the group; unlimited without one. Its droppable file pages count as free."""
    most = _limit_of(limit)
    try:
        used = int(use.read_text())
        lines = stat.read_text().splitlines()
        dropped = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return UNLIMITED
    return UNLIMITED if most == UNLIMITED else max(0, most - used + dropped)


def cores_free(root: Path = Path("/")) -> int:
    """At least one. A share of a core is none: threads beyond the quota stop all of them."""
    groups = [_cores_of_group(files) for files in _files_of_groups(root, CORE_GROUPS)]
    return max(1, min([_allowed(), *groups]))


def _allowed() -> int:
    """Cores that the system may run this process on; not every system says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cores_of_group(files: Sequence[Path]) -> int:
    """Whole cores of the group's quota; unlimited without one."""
    try:
        words = " ".join(file.read_text() for file in files).split()
        quota, period = (int(word) for word in words)
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return 1 << 30
    return quota // period if quota > 0 < period else 1 << 30
