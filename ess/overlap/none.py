"""No overlap: one pass over all rows in the order of the selection, after the whole fetch.

    compute  | index | resolve |  .  .  .  | pre_attn | attend_all |
    copy                       |== fetch ==|

The fetch is waited for at once, so its whole time shows: this is the baseline that DA and DBA are
measured against, and the schedule whose answer is bitwise that of RESIDENT.
"""

from __future__ import annotations

from collections.abc import Sequence

from ess.overlap.stages import P, Run, Stages, Where


def none(stages: Stages[Where, P]) -> Run[Sequence[P]]:
    stages.index()
    [whole] = stages.parts(1)
    assert whole, "a layer runs for a batch, not for none"
    where = stages.resolve(whole)
    yield
    stages.wait(where)
    stages.pre_attn()
    return [stages.attend_all(where)]
