"""Chunked prefill through a pipeline: when each chunk leaves each stage, and the total time.

Stage s begins chunk i when it has finished chunk i - 1 and stage s - 1 has finished chunk i. A
stage takes its share of the chunk's time, and an overhead per chunk that does not shrink with the
number of stages: small chunks use the hardware badly, and activations must be passed on.

The rest of a stage's time is bubbles: the fill and the drain, and the wait of short chunks behind
long ones. Requests that follow each other hide a part of them; how much depends on the scheduler
and is a parameter, 0 for one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ess.engine.chunking.sizes import Chunking, PrefillTime, chunks
from ess.errors import BadInput

STATIC_MULTIPLES: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
STARTS: Final = 4
SMOOTHINGS: Final = (0.0, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The share of the model on each stage; the shares add up to 1."""

    shares: tuple[float, ...]
    chunk_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.shares or min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-9:
            raise BadInput(f"shares {self.shares} must be positive and add up to 1")
        if self.chunk_overhead_s < 0:
            raise BadInput(f"an overhead of {self.chunk_overhead_s} s per chunk is negative")

    @classmethod
    def of_layers(cls, *, layers: int, stages: int, chunk_overhead_s: float = 0.0) -> Pipeline:
        """Stages of whole layers; if they do not divide evenly the later stages get one more."""
        if not 1 <= stages <= layers:
            raise BadInput(f"{stages} stages for {layers} layers: each needs at least one")
        low, more = divmod(layers, stages)
        counts = [low] * (stages - more) + [low + 1] * more
        shares = tuple(count / layers for count in counts)
        return cls(shares=shares, chunk_overhead_s=chunk_overhead_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prompt through a pipeline."""

    ttft_s: float
    busy_s: float
    chunk_sizes: tuple[int, ...]

    @property
    def bubble_share(self) -> float:
        """The share of the time until the first token that the busiest stage waits."""
        return 1 - self.busy_s / self.ttft_s

    def seconds_per_request(self, *, hidden: float) -> float:
        """Seconds per request when requests follow each other and fill `hidden` of the waiting."""
        if not 0 <= hidden <= 1:
            raise BadInput(f"hidden {hidden} must lie in [0, 1]")
        return self.ttft_s - hidden * (self.ttft_s - self.busy_s)


def prefill(
    time: PrefillTime, pipeline: Pipeline, sizes: Sequence[int], *, after: int = 0
) -> Prefill:
    """Runs chunks of the given sizes, in order, through all stages, behind `after` tokens."""
    free_at = [0.0] * len(pipeline.shares)
    done = after
    for size in sizes:
        work, arrives = time.of(size, after=done), 0.0
        for stage, share in enumerate(pipeline.shares):
            began = max(free_at[stage], arrives)
            arrives = free_at[stage] = began + work * share + pipeline.chunk_overhead_s
        done += size
    busy = (
        time.of(done - after, after=after) * max(pipeline.shares)
        + len(sizes) * pipeline.chunk_overhead_s
    )
    assert busy <= free_at[-1] * (1 + 1e-9), "a stage was busy for longer than the prefill took"
    return Prefill(ttft_s=free_at[-1], busy_s=busy, chunk_sizes=tuple(sizes))


def chunked(time: PrefillTime, pipeline: Pipeline, chunking: Chunking, *, prompt: int) -> Prefill:
    """Runs a prompt in the chunk sizes that the engine would choose."""
    return prefill(time, pipeline, chunks(time, chunking, prompt=prompt))


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPipeline:
    """The best settings, their result, and how many were tried."""

    chunking: Chunking
    result: Prefill
    tried_count: int


def autotune(
    time: PrefillTime, pipeline: Pipeline, *, prompt: int, unit: int = 1024
) -> TunedPipeline:
    """Finds the first chunk and smoothing with the shortest time to the first token.

    First the best static size, by doubling and then closing in. Then a few multiples of it with a
    few smoothings, since dynamic chunks begin larger than the best static size. Then single steps
    of either, as long as they help.
    """
    search = _Search(time, pipeline, prompt=prompt, unit=unit)
    static = search.best_static()
    firsts = {max(1, round(static * multiple)) for multiple in STATIC_MULTIPLES}
    grid = [(first, smoothing) for first in sorted(firsts) for smoothing in SMOOTHINGS]
    starts = sorted(grid, key=search.seconds)[:STARTS]
    best = min(map(search.descend, starts), key=search.seconds)
    return search.tuned(*best)


def exhaustive(
    time: PrefillTime, pipeline: Pipeline, *, prompt: int, unit: int = 1024
) -> TunedPipeline:
    """Tries every first chunk in multiples of `unit`, with every smoothing in steps of 0.05."""
    search = _Search(time, pipeline, prompt=prompt, unit=unit)
    every = [(first, place / 20) for first in range(1, search.first_max + 1) for place in range(21)]
    return search.tuned(*min(every, key=search.seconds))


class _Search:
    """Settings tried so far, by first chunk (in units) and smoothing."""

    def __init__(self, time: PrefillTime, pipeline: Pipeline, *, prompt: int, unit: int) -> None:
        if prompt < 1 or unit < 1:
            raise BadInput(f"a prompt of {prompt} tokens and a unit of {unit} must be positive")
        self._time, self._pipeline, self._prompt = time, pipeline, prompt
        self._unit = unit
        self.first_max = max(1, prompt // unit)
        self._results: dict[tuple[int, float], Prefill] = {}

    def seconds(self, setting: tuple[int, float]) -> float:
        return self._result(setting).ttft_s

    def _result(self, setting: tuple[int, float]) -> Prefill:
        first, smoothing = self._bounded(*setting)
        if (first, smoothing) not in self._results:
            chunking = self._chunking(first, smoothing)
            self._results[first, smoothing] = chunked(
                self._time, self._pipeline, chunking, prompt=self._prompt
            )
        return self._results[first, smoothing]

    def _chunking(self, first: int, smoothing: float) -> Chunking:
        size = first * self._unit
        return Chunking(first=size, context=self._prompt, smoothing=smoothing)

    def best_static(self) -> int:
        doubled = [1 << power for power in range(self.first_max.bit_length())]
        best = min(doubled, key=lambda first: self.seconds((first, 0.0)))
        return self.descend((best, 0.0), smoothing_step=0.0)[0]

    def descend(
        self, setting: tuple[int, float], *, smoothing_step: float = 0.05
    ) -> tuple[int, float]:
        """Steps to any of eight neighbours while that helps, long steps before short ones."""
        reach = max(1, setting[0] // 4)
        while reach:
            near = [
                self._bounded(setting[0] + side * reach, setting[1] + tilt * smoothing_step)
                for side in (-1, 0, 1)
                for tilt in (-1, 0, 1)
            ]
            best = min(near, key=self.seconds)
            if self.seconds(best) < self.seconds(setting):
                setting = best
            else:
                reach //= 2
        return setting

    def _bounded(self, first: int, smoothing: float) -> tuple[int, float]:
        return max(1, min(first, self.first_max)), round(min(1.0, max(0.0, smoothing)), 2)

    def tuned(self, first: int, smoothing: float) -> TunedPipeline:
        first, smoothing = self._bounded(first, smoothing)
        return TunedPipeline(
            chunking=self._chunking(first, smoothing),
            result=self._result((first, smoothing)),
            tried_count=len(self._results),
        )
