"""How long a decode step takes, for `tpot_control`: on the host its launch, on a device the work.

A device's lap lies between two events. The host reads it when it learns the step: the step's tokens
have come by then, and they were queued behind the second event, so the host does not wait. Where
the step was queued behind another, its lap begins when the device comes to it; else the time in
which the device waits for the host to launch is part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from ess.clock import Clock

Cuda: Any = torch.cuda


class Lap(Protocol):
    def end(self) -> None: ...

    @property
    def seconds(self) -> float:
        """The seconds of the lap; read it only when the step's tokens have come."""


class HostLap:
    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started_s = clock.now_s()

    def end(self) -> None:
        self.seconds = self._clock.now_s() - self._started_s


class DeviceLap:
    def __init__(self) -> None:
        self._started, self._ended = (Cuda.Event(enable_timing=True) for _ in range(2))
        self._started.record()

    def end(self) -> None:
        self._ended.record()

    @property
    def seconds(self) -> float:
        return float(self._started.elapsed_time(self._ended)) / 1e3


MakeLap: TypeAlias = Callable[[], Lap]


def laps_of(device: torch.device, clock: Clock) -> MakeLap:
    """Makes laps for this device; a lap begins when it is made."""
    return (lambda: HostLap(clock)) if device.type == "cpu" else DeviceLap
