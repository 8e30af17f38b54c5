"""`ess-bench handoff`: the cost of prefilling in one worker and decoding in another."""

from __future__ import annotations

from typing import Final

from ess.bench.handoff.landing import landing_rows
from ess.bench.handoff.mixed import MixedLoad, mixed_rows
from ess.bench.handoff.rates import rate_rows
from ess.bench.handoff.states import state_rows
from ess.bench.handoff.warmth import warmth_rows
from ess.bench.harness.lists import sizes
from ess.bench.harness.report import Row

PAGES: Final = 1536
TOKENS: Final = 3 * 4096
LOAD: Final = MixedLoad(requests=48, gap_s=2.0, shortest=256, longest=2048, output=96)
FEW: Final = MixedLoad(requests=3, gap_s=0.1, shortest=80, longest=200, output=8)


def handoff_benchmark(*, ctx: str = "4k,32k", smoke: bool = False) -> list[Row]:
    """Transports, states, the time behind a prompt, misses after landing, and the load of a day.

    Parameters
    ----------
    ctx
        Prompt lengths, a list.
    """
    if smoke:
        first = [*rate_rows(64), *state_rows(share=64), *landing_rows(640, rounds=1)]
        return [*first, *warmth_rows(640), *mixed_rows(FEW)]
    lengths = sizes("--ctx", ctx)
    landings = [row for length in lengths for row in landing_rows(length, rounds=_rounds(length))]
    moved = [*rate_rows(PAGES), *state_rows(), *landings]
    return [*moved, *warmth_rows(lengths[0]), *mixed_rows(LOAD)]


def _rounds(length: int) -> int:
    """How often a prompt length is run: long prompts take minutes."""
    return max(1, TOKENS // length)
