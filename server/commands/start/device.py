"""The device of `ess serve`: checked before anything is planned or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ess.engine.devices import Found, is_device, ordinal_of
from ess.errors import Unavailable
from ess.server.commands.start.trial import answer_of

if TYPE_CHECKING:
    from ess.server.commands.start.settings import Settings

PROBE: Final = "ess.engine.process.device_probe"
PROBE_S: Final = 120.0


def found_for(settings: Settings) -> Found | None:
    """The device; None if none is used. Unavailable if it cannot serve."""
    if not is_device(settings.device) or settings.engine == "paced":
        return None
    found = ask(ordinal_of(settings.device))
    if why := found.why_not(settings.device):
        raise Unavailable(why)
    return found


def ask(ordinal: int) -> Found:
    found, fault = answer_of("-m", PROBE, str(ordinal), limit_s=PROBE_S)
    if fault:
        raise Unavailable(f"CUDA device {ordinal} cannot be asked: {fault}")
    return msgspec.json.decode(found, type=Found)
