"""DBA: the batch's logits and top-k in two halves, so that half a's fetch hides behind half b's.

    compute  | index | resolve a | resolve b | pre_attn | resident a, b | fetched a, b |
    copy                         |=== fetch a ===|=== fetch b ===|

Only the indexer is split: its intensity does not fall with the batch. A batch of a single sequence
has no second half and runs as DA.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ess.overlap.stages import P, Run, Stages, Where


def dba(stages: Stages[Where, P]) -> Run[Sequence[P]]:
    stages.index()
    parts = stages.parts(2)
    assert 1 <= len(parts) <= 2, f"{len(parts)} halves"
    assert all(a.stop == b.start for a, b in pairwise(parts)), f"halves out of order: {parts}"
    halves = [stages.resolve(half) for half in parts]
    yield
    stages.pre_attn()
    residents = [stages.attend_resident(where) for where in halves]
    joined = []
    for where, resident in zip(halves, residents, strict=True):
        stages.wait(where)
        joined.append(stages.attend_fetched(where, resident))
    assert len(joined) == len(parts), "a half has no answer"
    return joined
