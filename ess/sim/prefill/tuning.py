"""The best chunks and layers of a pipeline, given the measured times of its layers.

A setting is judged by the time to the first token of one prompt, on the virtual clock. Of the
settings within a hundredth of the fastest, the best is the setting with the most tokens a second
for successive prompts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ess.engine.chunking.partition import partition
from ess.engine.chunking.sizes import Chunking, PrefillTime, chunks
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim.prefill.measured import Model
from ess.sim.prefill.stage_clock import ClockedChunks, clocked
from ess.units import PAGE_ROWS, align_up

AHEAD: Final = 2
IN_A_ROW: Final = 6
EQUAL: Final = 0.01
SMOOTHINGS: Final = (0.5, 0.65, 0.75, 0.85, 1.0)
CHUNKS_MAX: Final = 512
STEP: Final = 1.26
Layers = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Smoothing 0 is a static size. `layers` are the main layers of each stage."""

    first: int
    smoothing: float
    layers: Layers

    @property
    def is_dynamic(self) -> bool:
        return self.smoothing > 0

    def sizes(self, time: PrefillTime, prompt: int) -> tuple[int, ...]:
        context = align_up(prompt, PAGE_ROWS)
        chunking = Chunking(first=self.first, context=context, smoothing=self.smoothing)
        return chunks(time, chunking, prompt=prompt)

    def ends(self, time: PrefillTime, prompt: int) -> list[int]:
        return list(itertools.accumulate(self.sizes(time, prompt)))

    def flags(self) -> list[str]:
        """The flags of `ess prefill`."""
        counts = ",".join(str(stop - first) for first, stop in self.layers)
        dynamic = ["--dynamic-chunking", "--smooth", f"{self.smoothing:g}"]
        shared = ["--pp-layer-partition", counts]
        return [
            *("--chunk", str(self.first)),
            *(dynamic if self.is_dynamic else []),
            *(shared if len(self.layers) > 1 else []),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """For prompts of one length: the first token of one alone, tokens a second of several."""

    setting: Setting
    first_token_s: float
    tokens_per_s: float
    bubble_share: float
    chunk_count: int


def on_clock(seconds: Sequence[Sequence[float]]) -> ClockedChunks:
    """Runs the chunks with as many under way as a pipeline allows."""
    return clocked(seconds, under_way_max=len(seconds[0]) + AHEAD)


def forecast(model: Model, setting: Setting, prompt: int) -> Forecast:
    sizes = setting.sizes(model.time, prompt)
    seconds = model.stage_s(setting.layers, sizes)
    alone, in_a_row = on_clock(seconds), on_clock(seconds * IN_A_ROW)
    return Forecast(
        setting=setting,
        first_token_s=alone.span_s,
        tokens_per_s=IN_A_ROW * prompt / in_a_row.span_s,
        bubble_share=alone.bubble_share,
        chunk_count=len(sizes),
    )


def search(
    model: Model, layout: ModelLayout, default: Setting, prompt: int, *, chunk_max: int
) -> list[Forecast]:
    """The default, then the settings tried, best first: static and dynamic, with the default's
    layers and with those that the measured costs suggest. Settings that run the same chunks in the
    same layers are one."""
    if prompt < PAGE_ROWS:
        raise BadInput(f"a prompt of {prompt} tokens: nothing to tune below {PAGE_ROWS}")
    stages = len(default.layers)
    balanced = partition(layout, stages, costs=model.costs(layout.layer_count))
    cuts = dict.fromkeys([default.layers, tuple((part.start, part.stop) for part in balanced)])
    forecasts = [
        forecast(model, best(model, layers, prompt, chunk_max=chunk_max), prompt)
        for layers in cuts
        for best in (best_static, best_dynamic)
    ]
    best_s = min(each.first_token_s for each in forecasts)
    forecasts.sort(key=lambda each: _rank(each, best_s))
    tried: dict[tuple[Layers, tuple[int, ...]], Forecast] = {}
    for each in (forecast(model, default, prompt), *forecasts):
        tried.setdefault((each.setting.layers, each.setting.sizes(model.time, prompt)), each)
    return list(tried.values())


def _rank(each: Forecast, best_s: float) -> tuple[int, float]:
    steps = math.floor((each.first_token_s / best_s - 1) / EQUAL)
    return steps, -each.tokens_per_s


def best_static(model: Model, layers: Layers, prompt: int, *, chunk_max: int) -> Setting:
    return _first_of(model, layers, prompt, chunk_max, [0.0])


def best_dynamic(model: Model, layers: Layers, prompt: int, *, chunk_max: int) -> Setting:
    return _first_of(model, layers, prompt, chunk_max, SMOOTHINGS)


def _first_of(
    model: Model, layers: Layers, prompt: int, chunk_max: int, smoothings: Sequence[float]
) -> Setting:
    """The best first chunk for one prompt alone, up to the longest chunk that was measured."""
    tried = [
        Setting(first=first, smoothing=smoothing, layers=layers)
        for first in _firsts(prompt, chunk_max)
        for smoothing in smoothings
    ]

    def seconds(setting: Setting) -> float:
        return on_clock(model.stage_s(layers, setting.sizes(model.time, prompt))).span_s

    return min(tried, key=seconds)


def _firsts(prompt: int, chunk_max: int) -> list[int]:
    """First chunks to try: whole pages, about three to each doubling."""
    most = max(PAGE_ROWS, min(align_up(prompt, PAGE_ROWS), chunk_max // PAGE_ROWS * PAGE_ROWS))
    unit = PAGE_ROWS * max(1, prompt // CHUNKS_MAX // PAGE_ROWS)
    sizes = {most}
    size = float(unit)
    while size < most:
        sizes.add(align_up(int(size), PAGE_ROWS))
        size *= STEP
    return sorted(sizes)
