"""Nothing is split: one pass over all rows in the order of the selection, after the whole fetch.

    compute  | index | resolve | pre_attn |  .  | attend_all |
    copy                       |===== fetch ====|

On a device the fetch runs beside pre_attn, which costs nothing; what is longer shows. On a CPU it
shows whole: its rows are copied at once, by the thread that would compute. This is the baseline
that DA and DBA are measured against, and the schedule whose answer is bitwise that of RESIDENT.
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
    stages.pre_attn()
    stages.wait(where)
    return [stages.attend_all(where)]
