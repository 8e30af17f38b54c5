"""DA: the fetch runs beside pre_attn and the attention over rows that are here already.

compute  | index | resolve | pre_attn | attend_resident | attend_fetched |
copy                       |========= fetch ========|
"""

from __future__ import annotations

from collections.abc import Sequence

from ess.overlap.stages import P, Run, Stages, Where


def da(stages: Stages[Where, P]) -> Run[Sequence[P]]:
    stages.index()
    [whole] = stages.parts(1)
    assert whole, "a layer runs for a batch, not for none"
    where = stages.resolve(whole)
    yield
    stages.pre_attn()
    resident = stages.attend_resident(where)
    stages.wait(where)
    return [stages.attend_fetched(where, resident)]
