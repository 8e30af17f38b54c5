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

from ess.engine.chunking.sizes import Chunking, PrefillTime, chunks
from ess.errors import BadInput


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
