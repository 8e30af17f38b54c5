"""Runs Python in another process and returns its answer.

Such a process may load torch, or a driver that ends it; its parent does neither.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final, NamedTuple

from ess.server.commands.start.torchrun import cleaned

WORDS_MAX: Final = 300
KILLED_S: Final = 2.0


class Answer(NamedTuple):
    """The last line that the process printed, or why there is none."""

    printed: str = ""
    fault: str = ""


def answer_of(*words: str, limit_s: float) -> Answer:
    """Runs `python words...` and returns the last line that it prints."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**cleaned(os.environ), "OMP_NUM_THREADS": "1"},
    )
    try:
        printed, fault = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Answer(fault=f"nothing after {limit_s:g} s{_left(process)}")
    finally:
        process.kill()
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
    if process.returncode == 0 and (lines := printed.strip().splitlines()):
        return Answer(printed=lines[-1])
    lines = fault.strip().splitlines() or ["nothing was said"]
    return Answer(fault=lines[-1][:WORDS_MAX])


def _left(process: subprocess.Popen[str]) -> str:
    """Kills the process. SIGKILL ends no process inside a call of a driver that does not return:
    such a process stays, and the result is the end of a sentence that says so."""
    process.kill()
    try:
        process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        return f", and process {process.pid} has not ended {KILLED_S:g} s after SIGKILL"
    return ""
