"""What a step was told, and what of it another step may replay."""

from __future__ import annotations

from typing import NamedTuple

from ess.door.placement import Resolution


class Answer(NamedTuple):
    """What a group's first layer was told about a part; for each layer of the group its own.

    Layers that have appended fewer queries than `appended_min` may not read it: the selection may
    name rows that they do not have yet.
    """

    queries: range
    workspace: int
    appended_min: int
    resolutions: tuple[Resolution, ...]


class Recording(NamedTuple):
    """What the calls of a step were, between `begin` and `seal`."""

    query_count: int
    row_counts: dict[int, int]
    key_counts: dict[int, int]
    placed: object
