"""Members that are processes: one copy of the pools, and the rows of one rank."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from ess.kernels.mappings import mappings
from ess.ports import kept_port
from tests.support.few import few
from tests.support.forked import started
from tests.team.member_process import CHUNK, FAMILY, FORM, LENGTHS, digest
from tests.team.rig import alone


@contextmanager
def members(kind: str, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        init = f"tcp://127.0.0.1:{stack.enter_context(kept_port('127.0.0.1'))}"
        group = []
        for rank in range(size):
            words = ["-m", "tests.team.member_process", kind, str(size), str(rank), init]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = started("engine", words, **pipes)
            stack.enter_context(process)
            stack.callback(process.kill)
            group.append(process)
        yield group


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def pool_bytes(process: subprocess.Popen[str], what: str) -> int:
    """What the process has in memory of the pools' files: all of it, or its share."""
    pools = [each for each in mappings(process.pid) if each.file.startswith("/memfd:ess-")]
    return sum(getattr(pool, what) for pool in pools)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"), few([("tp", 2), ("cp", 3)], all_of=[("tp", 2), ("cp", 2), ("cp", 3)])
)
def test_processes_leave_what_one_rank_leaves_in_one_copy_of_the_pools(kind: str, size: int):
    wanted = digest(alone(FAMILY, FORM, LENGTHS, CHUNK))
    with members(kind, size) as group:
        assert [said(process) for process in group] == ["ready"] * size
        assert said(group[0]) == wanted
        assert [said(process) for process in group[1:]] == ["ran"] * (size - 1)
        resident = [pool_bytes(process, "resident_bytes") for process in group]
        shares = sum(pool_bytes(process, "share_bytes") for process in group)
        print(f"resident {resident}, shares {shares}")
        assert min(resident[1:]) > 1 << 20
        assert resident[0] <= shares * 1.01 <= resident[0] * 1.02
        for process in group:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait(60) for process in group] == [0] * size
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("ess-")]
