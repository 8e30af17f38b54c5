"""How likely a token was, as the engine finds it and the server tells it. Needs no torch."""

from __future__ import annotations

import msgspec


class Chance(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rank 1 is the likeliest. `top` holds (id, logprob), the likeliest first, equally likely
    tokens by id."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
