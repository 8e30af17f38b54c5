"""Network namespaces as hosts: each has an address, a loopback and ports of its own, and reaches
the others through a bridge. They end with the processes that hold them.

Without the right to make namespaces, or without `ip`, `unshare` and `nsenter`, `hosts` skips the
test that asks for them, with what the machine said.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

NET = "10.77.0"
TOOLS = ("ip", "unshare", "nsenter")
HOLD = ("sh", "-c", "echo here; exec sleep infinity")
AS_USER = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
"""A user who is not root first makes a user namespace, which has root."""


class Refused(Exception):
    """The machine makes no namespaces for us."""


@dataclass(frozen=True)
class Hosts:
    """`holders` are the processes whose namespaces they are."""

    holders: tuple[int, ...]

    def address(self, host: int) -> str:
        return f"{NET}.{host + 1}"

    def on(self, host: int) -> list[str]:
        """What stands before a command that is to run on the host."""
        return entering(self.holders[host])


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    with contextlib.ExitStack() as held:
        try:
            made = _made(count, held)
        except Refused as refused:
            pytest.skip(f"this machine makes no network namespaces: {refused}")
        yield made


def entering(holder: int) -> list[str]:
    return ["nsenter", "--target", str(holder), *AS_USER, "--net", "--"]


def _made(count: int, held: contextlib.ExitStack) -> Hosts:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Refused(f"it has no {' and no '.join(missing)}")
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    hub = _held(["unshare", *as_root, "--net", "--", *HOLD], held)
    holders = []
    run([*entering(hub), "ip", "link", "add", "between", "type", "bridge"])
    run([*entering(hub), "ip", "link", "set", "between", "up"])
    for host in range(count):
        holders.append(_held([*entering(hub), "unshare", "--net", "--", *HOLD], held))
        _join(hub, holders[-1], host)
    return Hosts(tuple(holders))


def _join(hub: int, holder: int, host: int) -> None:
    here, there = entering(hub), entering(holder)
    peer = ["peer", "name", "eth0", "netns", str(holder)]
    run([*here, "ip", "link", "add", f"host{host}", "type", "veth", *peer])
    run([*here, "ip", "link", "set", f"host{host}", "master", "between", "up"])
    run([*there, "ip", "address", "add", f"{NET}.{host + 1}/24", "dev", "eth0"])
    for name in ("lo", "eth0"):
        run([*there, "ip", "link", "set", name, "up"])


def _held(words: Sequence[str], held: contextlib.ExitStack) -> int:
    """The process that holds a namespace, once it does: neither tool forks before it."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    held.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != "here\n":
        raise Refused(process.communicate()[1].strip())
    return process.pid


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Refused(f"{' '.join(words)}: {done.stderr.strip()}")
