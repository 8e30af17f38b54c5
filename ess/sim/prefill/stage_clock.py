"""A pipeline on a virtual clock, given the measured time of each chunk on each stage.

Time passes as in the real pipeline. A stage runs one chunk after another, in one order for all
stages, each as soon as it has arrived. Then it sends its output to the next stage:

    asynchronously  it continues at once, unless the peer has `AHEAD_MAX` frames still to take
    synchronously   it continues when the peer has taken the frame

A link moves one frame at a time, at its rate; latency is added and does not occupy it. A peer takes
a frame when it holds fewer than `HELD_MAX` that it has not begun to run. The first stage begins a
chunk when it knows of fewer than `under_way_max` that have begun and not ended: the news of an end
takes the latency as well.

For P equal stages and M equal chunks over links that take no time, the share of bubbles is
(P - 1) / (P - 1 + M).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ess.comm.link import AHEAD_MAX, HELD_MAX
from ess.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between each stage and the next."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    is_async: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.bytes_per_s > 0):
            raise BadInput(
                f"links of {self.latency_s:g} s and {self.bytes_per_s:g} B/s: the latency must not"
                " be negative, the rate must be above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockedChunks:
    """When each chunk left the last stage, and how long each stage computed."""

    ended_s: tuple[float, ...]
    busy_s: tuple[float, ...]

    @property
    def span_s(self) -> float:
        return self.ended_s[-1]

    @property
    def efficiency(self) -> float:
        """The share of all stages' time in which they computed."""
        return math.fsum(self.busy_s) / (len(self.busy_s) * self.span_s)

    @property
    def bubble_share(self) -> float:
        return 1 - self.efficiency


@dataclass(slots=True)
class _Stage:
    """When each chunk began and ended here, when the peer took it, when stage and link are free."""

    began_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    free_s: float = 0.0
    link_free_s: float = 0.0

    def run(self, there_s: float, seconds: float) -> None:
        self.began_s.append(max(self.free_s, there_s))
        self.free_s = self.began_s[-1] + seconds
        self.ended_s.append(self.free_s)

    def send(self, peer: _Stage, links: Links, sent_bytes: float) -> float:
        """Sends the chunk that has just ended; returns when the peer has taken it."""
        sent_s = max(self.free_s, _before(self.taken_s, AHEAD_MAX))
        begun_s = max(sent_s, self.link_free_s, _before(peer.began_s, HELD_MAX))
        self.link_free_s = begun_s + sent_bytes / links.bytes_per_s
        self.taken_s.append(self.link_free_s + links.latency_s)
        self.free_s = sent_s if links.is_async else self.taken_s[-1]
        return self.taken_s[-1]


def clocked(
    seconds: Sequence[Sequence[float]],
    *,
    under_way_max: int,
    links: Links | None = None,
    sent_bytes: Sequence[float] | None = None,
) -> ClockedChunks:
    """`seconds[chunk][stage]`; `sent_bytes[chunk]` is what a stage sends to the next."""
    sizes = [0.0] * len(seconds) if sent_bytes is None else sent_bytes
    _check(seconds, sizes, under_way_max)
    over = Links() if links is None else links
    stages = [_Stage() for _ in seconds[0]]
    for times, size in zip(seconds, sizes, strict=True):
        there_s = _before(stages[-1].ended_s, under_way_max)
        if there_s and len(stages) > 1:
            there_s += over.latency_s
        for number, (stage, taken_s) in enumerate(zip(stages, times, strict=True)):
            stage.run(there_s, taken_s)
            if number + 1 < len(stages):
                there_s = stage.send(stages[number + 1], over, size)
    return ClockedChunks(
        ended_s=tuple(stages[-1].ended_s),
        busy_s=tuple(math.fsum(column) for column in zip(*seconds, strict=True)),
    )


def _before(times_s: Sequence[float], count: int) -> float:
    """The time of the chunk `count` places before the next chunk; 0 if there is none."""
    return times_s[-count] if len(times_s) >= count else 0.0


def _check(seconds: Sequence[Sequence[float]], sizes: Sequence[float], under_way_max: int) -> None:
    if not seconds or not seconds[0]:
        raise BadInput("a pipeline needs a chunk and a stage")
    for chunk, times in enumerate(seconds):
        if len(times) != len(seconds[0]) or not all(0 <= time < math.inf for time in times):
            raise BadInput(
                f"chunk {chunk} took {list(times)}: a time of 0 or more for each of"
                f" {len(seconds[0])} stages is needed"
            )
    if math.fsum(map(math.fsum, seconds)) <= 0:
        raise BadInput(f"{len(seconds)} chunks took no time")
    if len(sizes) != len(seconds) or not all(0 <= size < math.inf for size in sizes):
        raise BadInput(
            f"{len(sizes)} sizes for {len(seconds)} chunks: give 0 or more bytes for each"
        )
    if under_way_max < 1:
        raise BadInput(f"under_way_max is {under_way_max}, must be at least 1")
