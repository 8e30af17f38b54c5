"""Which requests run in the next step. Reads what the host has learned, changes nothing.

All decoding requests run, up to the batch limit, in order of rank. Beside them run prompt chunks,
one for each prefilling request, in order of rank, of as many tokens together as a step may prefill.
Admission is not decided here: the engine opens sequences, and the ledger says when they fit. The
simulator plans its steps with the same two functions.
"""

from __future__ import annotations

import math

from ess.engine.plan import Chunk, StepPlan, Turn
from ess.engine.requests.request import Request
from ess.engine.requests.roster import AnyRequest, Roster
from ess.units import PAGE_ROWS, align_up


def plan(
    roster: Roster[Request],
    *,
    batch_max: int,
    query_max: int,
    verified_max: int,
    chunk_tokens: int,
    positions_max: float = math.inf,
) -> StepPlan:
    batch = plan_batch(roster, batch_max=batch_max, query_max=query_max, verified_max=verified_max)
    chunks = plan_chunks(roster, chunk_tokens, positions_max)
    return StepPlan(
        turns=tuple(Turn(request, count) for request, count in batch),
        chunks=tuple(Chunk(*chunk) for chunk in chunks),
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
        (request, left)
        for request in roster.by_rank("decoding")
        if (left := request.left_count - request.ahead_count) > 0
    ][: min(batch_max, query_max)]
    spare = query_max - len(runnable)
    batch = []
    for request, left in runnable:
        count = min(request.draft_count, left - 1, verified_max - 1, spare)
        assert count >= 0, f"request {request.number}: {count} drafts"
        spare -= count
        batch.append((request, 1 + count))
    assert spare >= 0, f"{query_max - spare} queries in a step of at most {query_max}"
    return batch


def plan_chunks(
    roster: Roster[AnyRequest], chunk_tokens: int, positions_max: float
) -> list[tuple[AnyRequest, int, int]]:
    """The requests to prefill, each with its chunk's first prompt position and its end.

    A prompt is cut only if it does not fit into what the step has left, and then no other prompt
    comes behind it. So among requests of one priority, each younger than the one before, at most
    one prompt is prefilled in part, and its rest comes first in the next step.

    Several prompts have at most `positions_max` positions together, in whole pages, up to the ends
    of their chunks: few new tokens may stand behind long cached prefixes, whose rows are needed.
    """
    assert chunk_tokens > 0, f"chunks of {chunk_tokens} tokens"
    chunks: list[tuple[AnyRequest, int, int]] = []
    left, positions = chunk_tokens, 0
    for request in roster.by_rank("prefilling"):
        start, end = request.prefilled_count, request.prefill_count
        assert start < end, f"request {request.number} is prefilled and not decoding"
        stop = end if end - start <= left else _cut(start, left, is_alone=not chunks)
        positions += align_up(stop, PAGE_ROWS)
        if chunks and positions > positions_max:
            break
        if stop > start:
            chunks.append((request, start, stop))
            left -= stop - start
        if stop < end or left == 0:
            break
    assert left >= 0, f"{chunk_tokens - left} prompt tokens in a step of at most {chunk_tokens}"
    return chunks


def _cut(start: int, count: int, *, is_alone: bool) -> int:
    """Where a chunk ends that starts at `start` and is too long for `count` tokens: behind others
    at the end of a page, so that no step runs a few tokens of a prompt."""
    stop = start + count
    return stop if is_alone else max(start, stop // PAGE_ROWS * PAGE_ROWS)
