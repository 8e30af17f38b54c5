"""The answers of a placement in a step, and the parts of a step that a later step may replay."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from ess.door.checks import token_ids
from ess.door.sequences.sequence import Sequence
from ess.door.steps.placement import Resolution
from ess.errors import BadInput

Tokens = Many[Many[int]] | None


class PartAnswer(NamedTuple):
    """What a group's first layer was answered about a part; each layer of the group has its own.

    Layers that have appended fewer queries than `appended_min` may not read it: the selection may
    name rows that they do not have yet.
    """

    queries: range
    workspace: int
    appended_min: int
    resolutions: tuple[Resolution, ...]


class Recording(NamedTuple):
    """The calls of a step between `begin` and `seal`."""

    query_count: int
    row_counts: dict[int, int]
    key_counts: dict[int, int]
    placed: object


def known_texts(
    sequences: Many[Sequence], accepted: Many[int], tokens: Tokens
) -> list[list[int]] | None:
    """The accepted token ids of each sequence, which must match what is known of it."""
    if tokens is None:
        return None
    if not hasattr(tokens, "__iter__"):
        raise BadInput(f"tokens is {tokens!r}, must have a list of ids for each sequence")
    texts = [token_ids(f"tokens[{place}]", ids) for place, ids in enumerate(tokens)]
    sizes = [len(ids) for ids in texts]
    if sizes != accepted:
        raise BadInput(f"tokens have lengths {sizes}, accepted {accepted}")
    for sequence, ids in zip(sequences, texts, strict=True):
        start = sequence.progress.text_length
        known = sequence.progress.tokens[start : start + len(ids)]
        for place, (was, now) in enumerate(zip(known, ids, strict=False), start):
            if was != now:
                raise BadInput(
                    f"sequence {sequence.number} was opened with token {was} at position {place},"
                    f" and tokens has {now} there: {_why_known(sequence, start)}"
                )
    return texts


def _why_known(sequence: Sequence, start: int) -> str:
    """The likeliest reason for another token at a known position."""
    if start + 1 < len(sequence.progress.tokens):
        return f"its rows from position {start} on were not imported"
    return "a step's first token is the one known before it, the sampled one begins the next step"
