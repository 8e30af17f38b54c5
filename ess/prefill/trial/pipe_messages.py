"""The messages to and from the processes of a timed pipeline. Needs no torch.

Each process gets a Trial, as one JSON line on stdin. Then rank 0 takes Asks and gives Answers, a
line each. Every rank writes a Timed for each micro-batch into its own file, before it reports it.
"""

from __future__ import annotations

import msgspec

from ess.engine.process.messages import Launch


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """Links between stages with the delay and rate of a network."""

    latency_s: float
    bytes_per_s: float
    is_async: bool = True


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """`launch` has the rank; `secret` is the group's. Timed and Opened go to the file `log`."""

    launch: Launch
    secret: str
    log: str
    links: Slow | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that arrive together. A chunk ends at the next of `ends`, and at the prompt's own
    end. `forgets`: cached prefixes are dropped first."""

    prompts: list[list[int]]
    ends: list[int]
    forgets: bool = True


class PipeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """For each prompt: seconds until the last stage had run its last chunk, and how many of its
    rows were cached."""

    made_s: list[float]
    cached_counts: list[int]


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage is ready, with pools of this many bytes."""

    pool_bytes: int


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A micro-batch in a stage: its chunks as first position and end; then the times of its layers,
    elapsed and on a core, and of the work behind them. The first layer's time includes the
    embedding, or receiving the output of the stage before."""

    chunks: list[tuple[int, int]]
    wall_s: list[float]
    core_s: list[float]


Line = Opened | Timed
