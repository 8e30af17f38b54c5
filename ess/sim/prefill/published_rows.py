"""Published rows of chunked pipeline prefill: those that were fitted, and those predicted.

SGLang's chunked pipeline parallelism (LMSYS, 15 January 2026), H20, prompts of 128K tokens unless
said otherwise. Speedups are over one stage; throughput is the mean of 16 consecutive requests.

Assumptions, none of them tuned on a dynamic row. The share of attention in the one-stage time is
that of its operations at peak rates (bf16 attention, fp8 everything else). One stage has no chunk
overhead beyond its measured time. Fitted on static chunks only: the overhead per chunk and stage of
each model, and one share of bubbles that a following request hides, taken from DeepSeek-V3.1, for
which two static points are known, and used for Qwen3 unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ess.engine.chunking.sizes import Chunking, PrefillTime
from ess.sim.prefill.pipeline import Pipeline, Prefill, chunked

K: Final = 1024
PROMPT: Final = 128 * K
H20_BF16_PER_FP8: Final = 148 / 296


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One model's measurements. `static` are (chunk, speedup); `dynamic` (first, smoothing)."""

    name: str
    layers: int
    stages: int
    one_stage_s: float
    attention_flop_per_pair: float
    linear_flop_per_token: float
    static: tuple[tuple[int, float], ...]
    dynamic: tuple[int, float]

    @property
    def time(self) -> PrefillTime:
        pairs = PROMPT / 2
        attention = self.attention_flop_per_pair * pairs / H20_BF16_PER_FP8
        share = attention / (attention + self.linear_flop_per_token)
        return PrefillTime(
            quadratic=share * self.one_stage_s / PROMPT**2,
            linear=(1 - share) * self.one_stage_s / PROMPT,
        )


DEEPSEEK_V31: Final = PublishedModel(
    name="DeepSeek-V3.1 PP4 TP8",
    layers=61,
    stages=4,
    one_stage_s=48.5,
    attention_flop_per_pair=2 * 61 * 128 * (192 + 128),
    linear_flop_per_token=2 * 37e9,
    static=((4 * K, 3.20), (12 * K, 2.54 * 1.184)),
    dynamic=(12 * K, 0.65),
)
QWEN3_235B: Final = PublishedModel(
    name="Qwen3-235B PP8 TP4",
    layers=94,
    stages=8,
    one_stage_s=55.5,
    attention_flop_per_pair=2 * 94 * 64 * (128 + 128),
    linear_flop_per_token=2 * 22e9,
    static=((6 * K, 8 * 0.696),),
    dynamic=(18 * K, 0.80),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """A model with the constants fitted to its static rows."""

    published: PublishedModel
    overhead_s: float
    hidden: float

    def pipeline(self) -> Pipeline:
        return Pipeline.of_layers(
            layers=self.published.layers,
            stages=self.published.stages,
            chunk_overhead_s=self.overhead_s,
        )

    def run(self, first: int, smoothing: float, *, prompt: int = PROMPT) -> Prefill:
        chunking = Chunking(first=first, context=prompt, smoothing=smoothing)
        return chunked(self.published.time, self.pipeline(), chunking, prompt=prompt)

    def speedup(self, first: int, smoothing: float) -> float:
        taken = self.run(first, smoothing).seconds_per_request(hidden=self.hidden)
        return self.published.one_stage_s / taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A published row and our figure; `fitted` if a constant was fitted to it."""

    name: str
    published: float
    predicted: float
    unit: str
    fitted: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def fit_all() -> tuple[FittedModel, FittedModel]:
    deepseek = _fit_both(DEEPSEEK_V31)
    start = FittedModel(published=QWEN3_235B, overhead_s=0.0, hidden=deepseek.hidden)
    return deepseek, _fit_overhead(start)


def predictions() -> list[Prediction]:
    """Fitted rows first, then predicted ones, in the order of publication. The published
    efficiencies and margins over TP32 are left out: they repeat the speedups."""
    deepseek, qwen = fit_all()
    rows = [
        Prediction(
            name=f"{model.published.name} static {chunk // K}K speedup",
            published=speedup,
            predicted=model.speedup(chunk, 0.0),
            unit="x",
            fitted=True,
        )
        for model in (deepseek, qwen)
        for chunk, speedup in model.published.static
    ]
    return rows + _deepseek_rows(deepseek) + _qwen_rows(qwen)


def _deepseek_rows(model: FittedModel) -> list[Prediction]:
    dynamic = model.published.dynamic
    speedup, name = model.speedup(*dynamic), model.published.name
    ttft = model.run(*dynamic).ttft_s
    return [
        Prediction(name=f"{name} dynamic speedup", published=3.31, predicted=speedup, unit="x"),
        Prediction(name=f"{name} TTFT", published=15.5, predicted=ttft, unit="s"),
    ]


def _qwen_rows(model: FittedModel) -> list[Prediction]:
    dynamic = model.published.dynamic
    speedup, name = model.speedup(*dynamic), model.published.name
    rows = [
        Prediction(name=f"{name} dynamic speedup", published=6.14, predicted=speedup, unit="x"),
    ]
    longer = ((128 * K, 10.54), (256 * K, 32.68), (512 * K, 114.33), (1024 * K, 420.91))
    return rows + [
        Prediction(
            name=f"{name} TTFT at {prompt // K}K",
            published=seconds,
            predicted=model.run(*dynamic, prompt=prompt).ttft_s,
            unit="s",
        )
        for prompt, seconds in longer
    ]


def _fit_overhead(model: FittedModel) -> FittedModel:
    """The overhead that meets the first static row, given this share of hidden bubbles."""
    chunk, speedup = model.published.static[0]
    overhead = _falling_root(
        lambda value: replace(model, overhead_s=value).speedup(chunk, 0.0) - speedup, high=1.0
    )
    return replace(model, overhead_s=overhead)


def _fit_both(published: PublishedModel) -> FittedModel:
    """Meets both static rows: more hidden bubbles need more overhead, which hurts small chunks."""
    chunk, speedup = published.static[1]

    def at(hidden: float) -> FittedModel:
        return _fit_overhead(FittedModel(published=published, overhead_s=0.0, hidden=hidden))

    hidden = _falling_root(lambda value: speedup - at(value).speedup(chunk, 0.0), high=1.0)
    return at(hidden)


def _falling_root(function: Callable[[float], float], *, high: float) -> float:
    """Where a falling function crosses 0 in [0, high], or the nearer end of it."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2
