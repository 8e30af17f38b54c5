"""What /proc says of processes, any of which may end while it is read."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

LIFELINE = "ess.engine.process.lifeline"

GONE = (FileNotFoundError, ProcessLookupError)
"""The second: it has ended since its file was opened."""


def told(process: int, file: str) -> str:
    """All of a file of a process, nothing if that has ended."""
    with contextlib.suppress(*GONE):
        return Path(f"/proc/{process}/{file}").read_bytes().decode(errors="replace")
    return ""


def children(process: int) -> list[int]:
    """Of all its threads."""
    pids = []
    with contextlib.suppress(*GONE):
        for thread in Path(f"/proc/{process}/task").iterdir():
            pids += [int(word) for word in told(process, f"task/{thread.name}/children").split()]
    return pids


def kin(process: int) -> list[int]:
    """All processes below it."""
    return [below for child in children(process) for below in (child, *kin(child))]


def commands(process: int) -> dict[int, str]:
    """Its children and their command lines, without the lifeline that all of them begin with."""
    lines = {child: told(child, "cmdline").replace("\0", " ") for child in children(process)}
    return {child: line.replace(f"{LIFELINE} ", "") for child, line in lines.items() if line}


def worker_of(process: int) -> int:
    """The fork for which it stands, else the process itself."""
    word, _, fork = told(process, "comm").partition(" ")
    return int(fork) if word == "for" else process


def fields(process: int) -> list[str]:
    """What its `stat` says behind its name: its state is the first; none if it has ended."""
    return told(process, "stat").rpartition(")")[2].split()


def is_running(process: int) -> bool:
    """A process that has ended counts as ended before its parent has waited for it."""
    return fields(process)[:1] not in ([], ["Z"], ["X"])


def kill_all(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_for_end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        file = os.pidfd_open(process)
        ended, _, _ = select.select([file], [], [], 30.0)
        os.close(file)
        assert ended, f"process {process} goes on"
