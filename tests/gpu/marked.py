"""Programs that carry a mark in their environment, so that nothing that they start outlives them:
not even a process in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "FIRST_DAY_OF_ESS"
"""A variable of every process that such a program starts, and that these start. Names that begin
with ESS_ are settings to a server."""
GONE_S = 5.0
"""A process that waits in the driver may not end even when it is killed."""
ROUNDS = 3


def status_of(name: str, words: Sequence[str], printed: Any, limit_s: float) -> int | None:
    """Runs a program with the mark of this process and this name, prints to `printed`, and ends all
    that the program has started. The program's status, None where it had to be stopped."""
    mark = f"{os.getpid()}.{name}."
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", MARK: mark}
    child = subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_marked(mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GONE_S)


def end_marked(mark: str) -> None:
    """Kills all processes whose mark begins so, whatever session they are in. A process that one
    of them starts meanwhile is met in the next round."""
    for _ in range(ROUNDS):
        for process in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_bytes().split(b"\0")
            if any(word.startswith(wanted) for word in words):
                yield int(folder.name)
