"""Memory and cores that a process may use: what the system allows, and the limits of groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ess import free_resources
from ess.free_resources import cores_free, memory_free, memory_total

VERSION_2 = "sys/fs/cgroup/cpu.max"
VERSION_1 = "sys/fs/cgroup/cpu/cpu.cfs_{}_us"


@pytest.fixture(autouse=True)
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 5, 8, 9})


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_without_a_group_it_is_what_the_system_allows(tmp_path: Path) -> None:
    assert cores_free(tmp_path) == 6


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 6),
        ("200000 100000\n", 2),
        ("350000 100000\n", 3),
        ("5000 10000\n", 1),
        ("90000000 100000\n", 6),
        ("no numbers\n", 6),
        ("200000\n", 6),
    ],
)
def test_a_quota_counts_in_whole_cores(tmp_path: Path, text: str, cores: int) -> None:
    write(tmp_path, VERSION_2, text)
    assert cores_free(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 6), (0, 6), (200000, 2), (1000, 1)])
def test_so_does_one_in_two_files(tmp_path: Path, quota: int, cores: int) -> None:
    write(tmp_path, VERSION_1.format("quota"), f"{quota}\n")
    assert cores_free(tmp_path) == 6, "a quota without its period"
    write(tmp_path, VERSION_1.format("period"), "100000\n")
    assert cores_free(tmp_path) == cores


SERVICE = "0::/outer.slice/ess.service\n"
OLDER = "4:cpuset:/\n3:cpu,cpuacct:/outer\n2:memory:/outer\n0::/\n"


@pytest.mark.parametrize(
    ("said", "folder"),
    [(SERVICE, "outer.slice"), (SERVICE, "outer.slice/ess.service"), (OLDER, "")],
)
def test_the_limits_of_groups_below_the_topmost_hold(
    said: str, folder: str, tmp_path: Path
) -> None:
    """As a service of systemd has them."""
    memory = cores = f"sys/fs/cgroup/{folder}"
    limit, use, quota = "max", "current", {"cpu.max": "200000 100000\n"}
    if not folder:
        memory, cores = (f"sys/fs/cgroup/{name}/outer" for name in ("memory", "cpu"))
        limit, use = "limit_in_bytes", "usage_in_bytes"
        quota = {"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}
    write(tmp_path, "proc/self/cgroup", said)
    write(tmp_path, "proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 1000000 kB\n")
    assert memory_total(tmp_path) == 9000000 << 10
    assert (memory_free(tmp_path), cores_free(tmp_path)) == (1000000 << 10, 6)
    write(tmp_path, f"{memory}/memory.{limit}", "5000000\n")
    write(tmp_path, f"{memory}/memory.{use}", "3000000\n")
    write(tmp_path, f"{memory}/memory.stat", "inactive_file 500000\n")
    for name, text in quota.items():
        write(tmp_path, f"{cores}/{name}", text)
    assert (memory_free(tmp_path), cores_free(tmp_path)) == (2500000, 2)
    assert memory_total(tmp_path) == 5000000
    write(tmp_path, "proc/self/cgroup", "0::/gone\n")
    assert (memory_free(tmp_path), cores_free(tmp_path)) == (1000000 << 10, 6)


def test_where_the_system_does_not_say_all_cores_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(free_resources.os, "sched_getaffinity")
    monkeypatch.setattr(free_resources.os, "cpu_count", lambda: None)
    assert cores_free(tmp_path) == 1
