"""Times arms in turn in one process, so that a slow minute affects all of them.

Warm-up rounds are dropped, every round starts with another arm, `prepare` runs untimed, and an
arm's result is hashed untimed too: arms that claim to compute the same thing must return the same
bytes, and no result goes unused.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ess.errors import BadInput, BadState


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to do the work. `prepare` runs before every repetition, untimed (cold rows, say)."""

    name: str
    run: Callable[[], Any]
    prepare: Callable[[], Any] | None = None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """One arm's times, in the order of the repetitions, and the hash of its last result."""

    name: str
    seconds: list[float]
    result_hash: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def per(self, unit_count: float) -> list[float]:
        """Rates: `unit_count` per second, for each repetition."""
        return [unit_count / taken_s for taken_s in self.seconds]

    def each(self, unit_count: float = 1.0, *, scale: float = 1.0) -> list[float]:
        """Durations of one of `unit_count` units, in seconds times `scale`."""
        return [taken_s * scale / unit_count for taken_s in self.seconds]


def result_hash(result: Any) -> int:
    """CRC-32 of bytes, numbers, text, arrays and tensors, and of sequences of these."""
    if isinstance(result, (list, tuple)):
        return zlib.crc32(repr([result_hash(part) for part in result]).encode())
    if isinstance(result, (bytes, bytearray, memoryview)):
        return zlib.crc32(result)
    if result is None or isinstance(result, (bool, int, float, str)):
        return zlib.crc32(repr(result).encode())
    if hasattr(result, "detach"):
        result = result.detach().cpu().numpy()
    if isinstance(result, (np.ndarray, np.generic)):
        return zlib.crc32(np.ascontiguousarray(result).reshape(-1).view(np.uint8).data)
    raise BadInput(f"a result of type {type(result).__name__} has no hash; return array or bytes")


def measure(
    arms: Sequence[Arm],
    *,
    repeats: int = 9,
    warmups: int = 2,
    same_result: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Samples]:
    """Runs every arm `repeats` times, interleaved; one Samples per arm, in the order given."""
    if not arms or repeats < 1 or warmups < 0:
        raise BadInput(f"{len(arms)} arms, {repeats} repeats, {warmups} warm-ups: nothing to time")
    seconds: list[list[float]] = [[] for _ in arms]
    hashes = [0 for _ in arms]
    for turn in range(warmups + repeats):
        for place in range(len(arms)):
            at = (turn + place) % len(arms)
            taken, result = _time_once(arms[at], clock)
            hashes[at] = result_hash(result)
            if turn >= warmups:
                seconds[at].append(taken)
        if same_result and len(set(hashes)) > 1:
            names = [arm.name for arm in arms]
            differing = dict(zip(names, map("{:08x}".format, hashes), strict=True))
            raise BadState(f"arms that must agree returned different results: {differing}")
    return [
        Samples(name=arm.name, seconds=taken, result_hash=hashed)
        for arm, taken, hashed in zip(arms, seconds, hashes, strict=True)
    ]


def _time_once(arm: Arm, clock: Callable[[], float]) -> tuple[float, Any]:
    if arm.prepare is not None:
        arm.prepare()
    start = clock()
    result = arm.run()
    return clock() - start, result
