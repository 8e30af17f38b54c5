"""Chunked pipeline prefill: published rows predicted from fits to static chunks, and the tuner."""

from __future__ import annotations

import itertools
import random
from typing import Final

from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.report import Row, compare
from ess.engine.chunking.sizer import ChunkSizer
from ess.engine.chunking.sizes import Chunking, PrefillTime
from ess.sim.prefill.measured import Model
from ess.sim.prefill.pipeline import Pipeline, chunked, prefill
from ess.sim.prefill.published_rows import PROMPT, FittedModel, fit_all, predictions
from ess.sim.prefill.stage_clock import ClockedChunks, Links, clocked
from ess.sim.prefill.tuning import best_dynamic, best_static

TOLERANCE: Final = 0.05
TUNER_TARGET: Final = 0.99
SMOKE_PROMPT: Final = PROMPT // 4
NOISE: Final = 0.05
FOLLOWED_PROMPTS: Final = 20
STATE_BYTES: Final = 7168 * 4
SLOW_LINK: Final = 10e9 / 8
SLOW_LATENCY_S: Final = 1e-3
EQUAL_CHUNKS: Final = 32


def prefill_benchmark(*, smoke: bool) -> list[Row]:
    """Rows with a target were not fitted; those without were, or are settings of the fit."""
    rows = [
        agreement(
            name=prediction.name,
            unit=prediction.unit,
            ours=prediction.predicted,
            published=("SGLang", prediction.published),
            tolerance=None if prediction.fitted else TOLERANCE,
            config={"fitted": prediction.fitted},
        )
        for prediction in predictions()
    ]
    models = fit_all()
    rows += [_overhead(model) for model in models]
    rows += [_followed(model) for model in models]
    rows += [_sends(models[0]), _bubbles(models[0])]
    return rows + [_tuner(model, smoke=smoke) for model in models]


def _overhead(model: FittedModel) -> Row:
    static = model.published.static[0][0]
    return Row(
        name=f"{model.published.name} overhead per chunk and stage, fitted",
        value=model.overhead_s * 1e3,
        unit="ms",
        config={
            "hidden_bubbles": round(model.hidden, 3),
            "bubble_share_static": round(model.run(static, 0.0).bubble_share, 3),
            "bubble_share_dynamic": round(model.run(*model.published.dynamic).bubble_share, 3),
        },
    )


def _followed(model: FittedModel) -> Row:
    """Time to the first token with the chunk sizes of an engine that does not know its times: it
    profiles them at the start and observes them later, each with noise."""
    time, (first, smoothing) = model.published.time, model.published.dynamic
    sizer = ChunkSizer(first, context=PROMPT, dynamic=True, smoothing=smoothing)
    rand = random.Random(0)

    def seconds(done: int, count: int) -> float:
        return time.of(count, after=done) * rand.uniform(1 - NOISE, 1 + NOISE)

    sizer.profiled([(size, seconds(0, size)) for size in sizer.profile_sizes()])
    sizes: list[int] = []
    for _ in range(FOLLOWED_PROMPTS):
        sizes = []
        while (done := sum(sizes)) < PROMPT:
            sizes.append(sizer.next(done, PROMPT - done))
            sizer.observe(done, sizes[-1], seconds(done, sizes[-1]))
    return compare(
        name=f"{model.published.name} TTFT with fitted chunks",
        unit="s",
        ours=[prefill(time, model.pipeline(), sizes).ttft_s],
        baseline=("chunks of the true time", [model.run(first, smoothing).ttft_s]),
        target=TUNER_TARGET,
        config={"noise": NOISE, "prompts": FOLLOWED_PROMPTS, "chunks": len(sizes)},
    )


def _sends(model: FittedModel) -> Row:
    """Time to the first token over slow links, with hidden states in float32."""
    ways = [
        _on_links(model, Links(latency_s=SLOW_LATENCY_S, bytes_per_s=SLOW_LINK, is_async=is_async))
        for is_async in (True, False)
    ]
    return compare(
        name=f"{model.published.name} TTFT over 10 Gbit/s",
        unit="s",
        ours=[ways[0].span_s],
        baseline=("synchronous sends", [ways[1].span_s]),
        config={
            "bubble_share": round(ways[0].bubble_share, 3),
            "bubble_share_synchronous": round(ways[1].bubble_share, 3),
        },
    )


def _on_links(model: FittedModel, links: Links) -> ClockedChunks:
    sizes = model.run(*model.published.dynamic).chunk_sizes
    pipeline, ends = model.pipeline(), list(itertools.accumulate(sizes))
    seconds = [
        [
            model.published.time.of(size, after=end - size) * share + pipeline.chunk_overhead_s
            for share in pipeline.shares
        ]
        for size, end in zip(sizes, ends, strict=True)
    ]
    return clocked(
        seconds,
        under_way_max=len(pipeline.shares) + 2,
        links=links,
        sent_bytes=[size * STATE_BYTES for size in sizes],
    )


def _bubbles(model: FittedModel) -> Row:
    stages = model.published.stages
    ran = clocked([[1.0] * stages] * EQUAL_CHUNKS, under_way_max=stages + 2)
    return compare(
        name=f"bubbles of {stages} equal stages",
        unit="",
        ours=[ran.bubble_share],
        baseline=("(P - 1) / (P - 1 + M)", [(stages - 1) / (stages - 1 + EQUAL_CHUNKS)]),
        target=1.0 - 1e-9,
        config={"chunks": EQUAL_CHUNKS},
    )


def _tuner(model: FittedModel, *, smoke: bool) -> Row:
    """Time to the first token at the settings of `ess tune`, against the best of all settings."""
    prompt, published = SMOKE_PROMPT if smoke else PROMPT, model.published
    stages, pipeline = published.stages, model.pipeline()
    whole = Model(
        time=published.time,
        overhead_s=model.overhead_s * stages,
        shares=pipeline.shares,
        error=0.0,
        is_flat=False,
    )
    layers = tuple(itertools.pairwise(range(stages + 1)))
    tuned = min(
        (best(whole, layers, prompt, chunk_max=prompt) for best in (best_static, best_dynamic)),
        key=lambda setting: model.run(setting.first, setting.smoothing, prompt=prompt).ttft_s,
    )
    ours = model.run(tuned.first, tuned.smoothing, prompt=prompt)
    return compare(
        name=f"{published.name} tuned TTFT",
        unit="s",
        ours=[ours.ttft_s],
        baseline=("exhaustive search", [exhaustive_s(published.time, pipeline, prompt)]),
        target=TUNER_TARGET,
        config={"prompt": prompt, "first": tuned.first, "smoothing": tuned.smoothing},
    )


def exhaustive_s(
    time: PrefillTime, pipeline: Pipeline, prompt: int, *, unit: int = 1024, tilts: int = 20
) -> float:
    """The least time to the first token of all first chunks in whole units, with every smoothing
    from 0 to 1."""
    return min(
        chunked(
            time,
            pipeline,
            Chunking(first=first, context=prompt, smoothing=tilt / tilts),
            prompt=prompt,
        ).ttft_s
        for first in range(unit, prompt + 1, unit)
        for tilt in range(tilts + 1)
    )
