"""The generator's parameters for each layer, and published numbers to check the generator only.

`HOT` and `COLD` were fitted by `ess.sim.locality.fit_layers` only to the published misses of each
layer at 32K (ratios 0.2 and 0.3 of slots to context, `ess.sim.published`). Layer 17 is unlike the
others: its hot set grows with the context; its value at 32K was set by hand.
"""

from __future__ import annotations

from typing import Final

from ess.sim.locality.selections import LayerProfile


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


LAYER_COUNT: Final = 61
STRANGE_LAYER: Final = 17
STRANGE_LAYER_32K: Final = {0.4: 218.0, 0.5: 151.0, 0.9: 26.0}  # beyond the published tables

MEAN_SIMILARITY_32K: Final = 0.573
USELESS_ROWS_MEAN: Final = 663
USELESS_ROWS_MAX: Final = 1353

# Share of misses at 4,096 slots, one query a step, for another model (GLM-5.1, LongBench-v2).
POLICY_MISS_PERCENT: Final = {"lru": 13.4, "random": 16.1, "fifo": 17.2, "min": 8.2}

HOT: Final = _numbers(
    """
    4500 5750 4150 4650 4550 5000 6400 6150 5800 6350 6600 7300 5650 4500 4200 6400 6600 0 6550
    8000 8050 8100 4600 6750 8400 6500 7100 7650 6850 7350 7500 6650 6800 7150 6650 7300 7050
    4500 7400 8000 7050 7050 6800 8200 5000 6800 8000 5400 7350 7550 7500 6700 6700 6700 6500
    7450 6200 5850 5000 7150 5850
    """
)
COLD: Final = _numbers(
    """
    14 24 18 11 26 17 66 41 34 32 50 70 79 41 24 37 68 0 34 41 71 55 34 28 40 32 71 65 76 91 56
    91 77 119 53 70 49 31 52 84 91 63 42 71 35 50 94 32 44 60 69 45 59 51 41 66 42 38 37 50 34
    """
)

STRANGE_PROFILE: Final = LayerProfile(hot_share=0.42, cold=95)


def profile(layer: int) -> LayerProfile:
    """The fitted profile of one of the 61 layers; members of quiet layers also drift less."""
    if layer == STRANGE_LAYER:
        return STRANGE_PROFILE
    return restless(hot=HOT[layer], cold=COLD[layer])


def restless(*, hot: int, cold: int) -> LayerProfile:
    """A layer whose members drift in proportion to its cold picks, by a factor common to all."""
    default = LayerProfile()
    return LayerProfile(hot=hot, cold=cold, drift=default.drift * cold / default.cold)
