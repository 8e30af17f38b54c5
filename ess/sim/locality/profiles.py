"""Published numbers that the generator is held against, and the parameters fitted to them.

Misses are rows per request and layer in one step of two query tokens, read off the figures of the
ESS paper (arXiv 2512.10576): figure 5 and 8 by layer (+/- 5), figure 9 as means over layers (+/- 8,
beyond a ratio of 0.4 within 10 of each other). A ratio is slots over context.

`HOT` and `COLD` were fitted by `ess.sim.locality.calibration` to the two profiles at 32K, to
nothing else.
Layer 17 is of its own kind: what is hot in it grows with the context; set by hand at 32K.
"""

from __future__ import annotations

from typing import Final

from ess.sim.locality.selections import LayerProfile


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


K: Final = 1024
LAYER_COUNT: Final = 61
STRANGE_LAYER: Final = 17

MISSES_32K_AT_02: Final = _numbers(
    """
    27 64 34 17 53 53 198 121 93 102 161 254 203 84 46 119 213 605 100 204 310 256 73 104 224
    107 246 257 249 321 180 282 249 395 171 253 178 63 202 360 305 220 146 321 81 169 374 78
    177 239 261 150 193 168 132 249 125 104 85 184 95
    """
)

MISSES_32K_AT_03: Final = _numbers(
    """
    23 42 31 23 44 56 123 74 62 59 94 136 143 72 42 69 127 349 126 87 143 119 60 51 90 59 137
    131 144 176 115 170 145 223 101 137 95 56 105 166 173 122 79 145 62 94 187 56 88 122 137
    84 112 97 76 131 77 69 65 98 62
    """
)

RATIOS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MEAN_MISSES: Final = {
    32 * K: (640, 190, 103, 80, 65, 52, 40, 27, 14),
    64 * K: (222, 106, 76, 64, 53, 39, 31, 17, 13),
    96 * K: (178, 115, 94, 81, 67, 53, 42, 27, 14),
    128 * K: (137, 97, 86, 72, 59, 47, 39, 25, 14),
}
STRANGE_LAYER_32K: Final = {0.2: 605, 0.3: 349, 0.4: 218, 0.5: 151, 0.9: 26}

MEAN_SIMILARITY_32K: Final = 0.573
USELESS_ROWS_MEAN: Final = 663
USELESS_ROWS_MAX: Final = 1353

# Share of misses at 4,096 slots, one query a step, another model (GLM-5.1, LongBench-v2).
POLICY_MISS_PERCENT: Final = {"lru": 13.4, "random": 16.1, "fifo": 17.2, "min": 8.2}

HOT: Final = _numbers(
    """
    4500 5750 4150 3850 4550 3700 6400 6150 5800 6350 6600 7300 5650 4500 4200 6400 6600 0
    3500 8000 8050 8100 4600 6750 8400 6500 7100 7650 6850 7350 6200 6650 6800 7150 6650 7300
    7050 4500 7400 8000 7050 7050 6800 8200 5000 6800 8000 5400 7350 7550 7500 6700 6700 6700
    6500 7450 6200 5850 5000 7150 5850
    """
)
COLD: Final = _numbers(
    """
    14 24 18 11 26 30 66 41 34 32 50 70 79 41 24 37 68 0 61 41 71 55 34 28 40 32 71 65 76 91
    62 91 77 119 53 70 49 31 52 84 91 63 42 71 35 50 94 32 44 60 69 45 59 51 41 66 42 38 37 50
    34
    """
)

STRANGE_PROFILE: Final = LayerProfile(hot_share=0.42, cold=95)


def profile(layer: int) -> LayerProfile:
    """The fitted profile of one of the 61 layers; members of quiet layers also drift less."""
    if layer == STRANGE_LAYER:
        return STRANGE_PROFILE
    return restless(hot=HOT[layer], cold=COLD[layer])


def restless(*, hot: int, cold: int) -> LayerProfile:
    """A layer whose members drift in the proportion to its cold picks that all layers share."""
    default = LayerProfile()
    return LayerProfile(hot=hot, cold=cold, drift=default.drift * cold / default.cold)
