"""How much of each prompt an earlier request has prefilled, by the blocks that a trace names.

There is one cache for all, of whole blocks, the least recently used first to go; a block counts as
soon as the first request with it arrives, which is early by the time of one prefill. At least one
token of a prompt is run, and with MTP also the last reused page: its rows saw another continuation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ess.errors import BadInput
from ess.sim.serving.arrivals import MOONCAKE_BLOCK_TOKENS, Arrival
from ess.units import PAGE_ROWS


def reused(
    arrivals: Sequence[Arrival], *, token_max: int | None = None, has_mtp: bool = True
) -> list[int]:
    """Prompt tokens reused, per request; `token_max` limits the cache."""
    held: OrderedDict[int, None] = OrderedDict()
    counts = []
    for arrival in arrivals:
        count = 0
        for block in arrival.prefix_blocks:
            if block not in held:
                break
            count += 1
        for block in reversed(arrival.prefix_blocks):
            held[block] = None
            held.move_to_end(block)
        while token_max is not None and len(held) * MOONCAKE_BLOCK_TOKENS > token_max:
            held.popitem(last=False)
        counts.append(_usable(count * MOONCAKE_BLOCK_TOKENS, arrival.prompt_tokens, has_mtp))
    return counts


def shared(arrivals: Sequence[Arrival], share: float) -> list[int]:
    """The same share of every prompt, in whole pages."""
    if not 0.0 <= share <= 1.0:
        raise BadInput(f"a cached share of {share} is outside 0..1")
    return [
        _usable(int(share * arrival.prompt_tokens), arrival.prompt_tokens, False)
        for arrival in arrivals
    ]


def _usable(tokens: int, prompt: int, has_mtp: bool) -> int:
    pages = min(tokens, prompt - 1) // PAGE_ROWS - has_mtp
    return max(0, pages) * PAGE_ROWS
