"""The device that `ess serve` is told to use: asked before anything is planned or loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from ess.engine.devices import Found, is_device, ordinal_of
from ess.errors import Unavailable
from ess.server.commands.start.torchrun import cleaned

if TYPE_CHECKING:
    from ess.server.commands.start.settings import Settings

PROBE: Final = "ess.engine.process.device_probe"
PROBE_S: Final = 120.0


def found_for(settings: Settings) -> Found | None:
    """None where nothing is served on a device; Unavailable where it cannot be."""
    if not is_device(settings.device) or settings.engine == "paced":
        return None
    found = ask(ordinal_of(settings.device))
    if why := found.why_not(settings.device):
        raise Unavailable(why)
    return found


def ask(ordinal: int) -> Found:
    command = [sys.executable, "-m", PROBE, str(ordinal)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_S, env=cleaned(os.environ)
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"CUDA device {ordinal} was asked for, and has not answered within {PROBE_S:.0f} s"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise Unavailable(f"CUDA device {ordinal} cannot be asked: {last[:300]}")
    return msgspec.json.decode(done.stdout, type=Found)
