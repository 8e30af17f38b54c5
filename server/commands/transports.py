"""The part of `ess doctor` about handoffs: which transports work here, and how fast.

No transport is needed to serve; a split into prefill and decode workers needs one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from ess.server.commands.start.trial import answer_of

TRIAL_S: Final = 60.0
HINTS: Final[Mapping[str, str]] = {
    "tcp": "give --transfer-host an address of this machine that the other workers reach",
    "shared": "workers of one user in one namespace of processes; else hand over by tcp",
    "nixl": "optional, for RDMA; tcp needs nothing",
}


class TransportTrial(msgspec.Struct, frozen=True, kw_only=True):
    grade: Literal["ok", "warn"]
    state: str
    hint: str = ""


def tried(kind: str, host: str) -> TransportTrial:
    printed, fault = answer_of("-m", "ess.transfer.selfcheck", kind, host, limit_s=TRIAL_S)
    if not fault:
        return judged(msgspec.json.decode(printed))
    grade: Literal["ok", "warn"] = "ok" if "not installed" in fault else "warn"
    return TransportTrial(grade=grade, state=fault, hint=HINTS[kind])


def judged(trial: Mapping[str, Any]) -> TransportTrial:
    speed, copy = trial["gb_per_s"], trial["memcpy_gb_per_s"]
    state = f"{speed:.2f} GB/s between two processes, a copy in memory {copy:.2f} GB/s"
    return TransportTrial(grade="ok", state=state)
