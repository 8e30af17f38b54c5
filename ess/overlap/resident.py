"""RESIDENT: no plan, no fetch, no merge, for a step whose rows are all in slots.

    compute  | index | locate | pre_attn | attend_all |

A row that is absent after all (the step's own new rows may push one out) sends the layer the way of
`none`, which attends the same rows in the same order: the answer is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from ess.overlap.stages import P, Run, Stages, Where


def resident(stages: Stages[Where, P]) -> Run[Sequence[P]]:
    stages.index()
    [whole] = stages.parts(1)
    assert whole, "a layer runs for a batch, not for none"
    where = stages.locate(whole)
    if where is None:
        where = stages.resolve(whole)
    yield
    stages.pre_attn()
    stages.wait(where)
    return [stages.attend_all(where)]
