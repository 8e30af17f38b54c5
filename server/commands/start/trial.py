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


class Answer(NamedTuple):
    """The last line that the process printed, or why there is none."""

    printed: str = ""
    fault: str = ""


def answer_of(*words: str, limit_s: float) -> Answer:
    """Runs `python words...` and returns the last line that it prints."""
    environment = {**cleaned(os.environ), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=limit_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Answer(fault=f"nothing after {limit_s:g} s")
    if done.returncode == 0 and (lines := done.stdout.strip().splitlines()):
        return Answer(printed=lines[-1])
    lines = done.stderr.strip().splitlines() or ["nothing was said"]
    return Answer(fault=lines[-1][:WORDS_MAX])
