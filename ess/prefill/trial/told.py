"""What the processes of a timed pipeline are told, and what they say. Needs no torch.

Each is told a Trial, as one JSON line on stdin. Then rank 0 is asked: an Ask a line, an Answer a
line. Every rank writes a Timed for each micro-batch into its own file, before it reports it.
"""

from __future__ import annotations

import msgspec

from ess.engine.process.messages import Launch


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """Links between stages, as slow as over a network."""

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
    """Prompts that come at once. A chunk ends at the next of `ends` behind its beginning, and at
    the prompt's own end. `forgets` cached prefixes first."""

    prompts: list[list[int]]
    ends: list[int]
    forgets: bool = True


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """For each prompt: seconds until the last stage had run its last chunk, and how many of its
    rows were cached."""

    made_s: list[float]
    cached_counts: list[int]


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage is there, with pools of so many bytes."""

    pool_bytes: int


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A micro-batch in a stage: its chunks, first and behind the last position; and what its layers
    took one after another, as time that passed and as time on a core, then what came behind them.
    The first layer has the embedding, or the taking of what the stage before has made."""

    chunks: list[tuple[int, int]]
    wall_s: list[float]
    core_s: list[float]


Line = Opened | Timed
