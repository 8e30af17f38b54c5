"""The tokens a request takes from one step: verification of drafts by drawing the targets."""

from __future__ import annotations

from torch import Tensor

from ess.engine.batch import Line
from ess.engine.sampling import draw


def choose(line: Line, logits: Tensor) -> list[int]:
    """From logits [queries, vocabulary]: each target, as long as the draft before it was right."""
    request = line.request
    tokens, made = line.history, []
    for offset in range(len(line.tokens)):
        token = draw(
            logits[offset],
            request.sampling,
            tokens=tokens,
            prompt_count=len(request.prompt),
        )
        made.append(token)
        tokens.append(token)
        if offset + 1 < len(line.tokens) and line.tokens[offset + 1] != token:
            break
    return made
