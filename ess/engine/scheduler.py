"""Which requests run in the next step. Reads what the host has learned, changes nothing.

All decoding requests run, up to the batch limit, in order of rank; beside them at most one prompt
chunk: of the prefilling request that is first in rank. Admission is not decided here: the
engine opens sequences, and the ledger says when they fit. The simulator plans its steps with the
same two functions.
"""

from __future__ import annotations

from ess.engine.plan import Chunk, StepPlan, Turn
from ess.engine.request import Request
from ess.engine.roster import AnyRequest, Roster


def plan(
    roster: Roster[Request], *, batch_max: int, query_max: int, verified_max: int, chunk_tokens: int
) -> StepPlan:
    batch = plan_batch(roster, batch_max=batch_max, query_max=query_max, verified_max=verified_max)
    chunk = plan_chunk(roster, chunk_tokens)
    return StepPlan(
        turns=tuple(Turn(request, count) for request, count in batch),
        chunk=None if chunk is None else Chunk(*chunk),
    )


def plan_batch(
    roster: Roster[AnyRequest], *, batch_max: int, query_max: int, verified_max: int
) -> list[tuple[AnyRequest, int]]:
    """The requests that decode, and how many tokens the step verifies for each.

    Drafts beyond what a request may still make, or beyond what the step can hold, are left out.

    The tokens that a request may still make are counted as if its steps under way had made all that
    they can. So no row is ever planned beyond the request's last position, and a request that may
    be over is not launched until the host knows.
    """
    assert min(batch_max, query_max, verified_max) > 0, (batch_max, query_max, verified_max)
    runnable = [
        request
        for request in roster.by_rank("decoding")
        if request.left_count > request.ahead_count
    ][: min(batch_max, query_max)]
    spare = query_max - len(runnable)
    batch = []
    for request in runnable:
        left = request.left_count - request.ahead_count
        count = min(request.draft_count, left - 1, verified_max - 1, spare)
        assert count >= 0, f"request {request.number}: {count} drafts"
        spare -= count
        batch.append((request, 1 + count))
    assert spare >= 0, f"{query_max - spare} queries in a step of at most {query_max}"
    return batch


def plan_chunk(roster: Roster[AnyRequest], chunk_tokens: int) -> tuple[AnyRequest, int, int] | None:
    """The request to prefill, and the chunk's first prompt position and the one behind it."""
    assert chunk_tokens > 0, f"chunks of {chunk_tokens} tokens"
    request = roster.first("prefilling")
    if request is None:
        return None
    start = request.prefilled_count
    assert start < request.prefill_count, f"request {request.number} is prefilled and not decoding"
    return request, start, min(start + chunk_tokens, request.prefill_count)
