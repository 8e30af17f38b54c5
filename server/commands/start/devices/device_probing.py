"""The device of `ess serve`: checked before anything is planned or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from ess.engine.devices import DeviceReport, devices_here, is_device, ordinal_of
from ess.errors import Unavailable
from ess.server.commands.start.trial import answer_of

if TYPE_CHECKING:
    from ess.server.commands.start.settings import Settings

PROBE: Final = "ess.engine.process.checks.device_probe"
PROBE_S: Final = 120.0


def device_reports(settings: Settings) -> Mapping[str, DeviceReport]:
    """The devices of the engine's processes here, by name; empty if they use none. Unavailable if
    one cannot serve."""
    if not is_device(settings.device) or settings.engine == "paced":
        return {}
    names = devices_here(settings) if settings.is_staged else (settings.device,)
    reports = {name: ask(ordinal_of(name)) for name in dict.fromkeys(names)}
    for name, report in reports.items():
        if why := report.why_not(name):
            raise Unavailable(why)
    return reports


def ask(ordinal: int) -> DeviceReport:
    printed, fault = answer_of("-m", PROBE, str(ordinal), limit_s=PROBE_S)
    if fault:
        raise Unavailable(f"CUDA device {ordinal} cannot be asked: {fault}")
    return msgspec.json.decode(printed, type=DeviceReport)
