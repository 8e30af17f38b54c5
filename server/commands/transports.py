"""The part of `ess doctor` about handoffs: which transports work here, and how fast.

No transport is needed to serve; a split into prefill and decode workers needs one of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

TRIAL_S: Final = 60.0
HINTS: Final[Mapping[str, str]] = {
    "tcp": "give --transfer-host an address of this machine that the other workers reach",
    "shared": "workers of one user in one namespace of processes; else hand over by tcp",
    "nixl": "optional, for RDMA: pip install 'ess[nixl]'; tcp needs nothing",
}


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    grade: Literal["ok", "warn"]
    state: str
    hint: str = ""


def tried(kind: str, host: str) -> Tried:
    words = [sys.executable, "-m", "ess.transfer.selfcheck", kind, host]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        return Tried(grade="warn", state=f"nothing after {TRIAL_S:g} s", hint=HINTS[kind])
    if done.returncode == 0:
        return judged(msgspec.json.decode(done.stdout.splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1][:300]
    grade: Literal["ok", "warn"] = "ok" if "not installed" in last else "warn"
    return Tried(grade=grade, state=last, hint=HINTS[kind])


def judged(trial: Mapping[str, Any]) -> Tried:
    speed, copy = trial["gb_per_s"], trial["memcpy_gb_per_s"]
    state = f"{speed:.2f} GB/s between two processes, a copy in memory {copy:.2f} GB/s"
    return Tried(grade="ok", state=state)
