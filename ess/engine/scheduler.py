"""Who runs in the next step. Reads what the host has learned, changes nothing.

All decoding requests run, up to the batch limit, in order of rank; beside them at most one prompt
chunk, of the first in rank that has not all of its prompt. Admission is not decided here: the
engine opens sequences, and the ledger says when they fit.
"""

from __future__ import annotations

from ess.engine.plan import Chunk, StepPlan, Turn
from ess.engine.roster import Roster


def plan(
    roster: Roster, *, batch_max: int, query_max: int, verified_max: int, chunk_tokens: int
) -> StepPlan:
    return StepPlan(
        turns=_turns(roster, min(batch_max, query_max), query_max, verified_max),
        chunk=_chunk(roster, chunk_tokens),
    )


def _turns(roster: Roster, batch_max: int, query_max: int, verified_max: int) -> tuple[Turn, ...]:
    """Drafts beyond what a request may still make, or what the step can hold, are left out.

    What a request has left is counted as if its steps under way had made all that they can: so no
    row is ever planned beyond its last position, and one that may be over waits until it is known.
    """
    runnable = [
        request
        for request in roster.by_rank("decoding")
        if request.left_count > request.ahead_count
    ][:batch_max]
    spare = query_max - len(runnable)
    turns = []
    for request in runnable:
        left = request.left_count - request.ahead_count
        count = min(request.draft_count, left - 1, verified_max - 1, spare)
        assert count >= 0, f"request {request.number}: {count} drafts"
        spare -= count
        turns.append(Turn(request, 1 + count))
    return tuple(turns)


def _chunk(roster: Roster, chunk_tokens: int) -> Chunk | None:
    request = roster.first("prefilling")
    if request is None:
        return None
    start = request.prefilled_count
    return Chunk(request, start, min(start + chunk_tokens, len(request.prompt) - 1))
