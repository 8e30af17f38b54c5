"""Machines that share nothing but a wire: network namespaces of this one, joined by a pair of ends.

A process in either of them has its own loopback, and reaches the other at its address alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Machine:
    name: str
    address: str

    def words(self, *command: str) -> list[str]:
        """The command, run there."""
        return ["ip", "netns", "exec", self.name, *command]


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    mark = f"{os.getpid() % 65536:x}"
    machines = [Machine(f"ess-{mark}-{at}", f"10.213.{os.getpid() % 256}.{at}") for at in (1, 2)]
    ends = [f"ess{mark}{at}" for at in (1, 2)]
    with contextlib.ExitStack() as made:
        for machine in machines:
            if subprocess.run(["ip", "netns", "add", machine.name], check=False).returncode:
                pytest.skip("this system makes no network namespaces")
            made.callback(subprocess.run, ["ip", "netns", "delete", machine.name], check=True)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for machine, end in zip(machines, ends, strict=True):
            ip("link", "set", end, "netns", machine.name)
            ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", end)
            for name in ("lo", end):
                ip("-n", machine.name, "link", "set", name, "up")
        yield machines[0], machines[1]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
