"""Who runs in the next step. Reads requests, changes nothing.

All decoding requests run, up to the batch limit, oldest first; beside them at most one prompt
chunk, of the request that has been prefilling longest. Admission is not decided here: the engine
opens sequences, and the ledger says when they fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from ess.engine.batch import Chunk, Line, StepPlan
from ess.engine.request import Request


def plan(
    requests: Sequence[Request], *, batch_max: int, query_max: int, chunk_tokens: int
) -> StepPlan:
    return StepPlan(
        lines=_lines(requests, batch_max, query_max), chunk=_chunk(requests, chunk_tokens)
    )


def _lines(requests: Sequence[Request], batch_max: int, query_max: int) -> tuple[Line, ...]:
    """Drafts beyond what a request may still make, or what the step can hold, are left out."""
    decoding = [one for one in requests if one.state == "decoding"][: min(batch_max, query_max)]
    spare = query_max - len(decoding)
    lines = []
    for request in decoding:
        count = min(len(request.drafts), request.left_count - 1, spare)
        spare -= count
        lines.append(Line(request, (request.tokens[-1], *request.drafts[:count])))
    return tuple(lines)


def _chunk(requests: Sequence[Request], chunk_tokens: int) -> Chunk | None:
    for request in requests:
        if request.state == "prefilling":
            assert request.sequence is not None
            start = request.prefilled_count
            stop = min(start + chunk_tokens, len(request.prompt) - 1)
            return Chunk(request, start, stop)
    return None
