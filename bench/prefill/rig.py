"""Pipelines of the embedded model, a thread per stage, and the text they read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from ess.bench.harness.text import token_ids
from ess.engine.chunking.partition import counted_costs, partition
from ess.engine.config import ProcessConfig
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.load import EMBEDDED
from ess.prefill.trial.pipe import Kind, PipeTrial, TrialTimes, model_config
from ess.prefill.trial.pipe_messages import Slow
from ess.sim.prefill.measured import MeasuredChunk
from ess.sim.prefill.tuning import Layers

CONFIG: Final = ProcessConfig(threads=1, mtp=2)
PROMPT_STRIDE: Final = 997


def embedded() -> tuple[ModelConfig, ModelLayout]:
    config = model_config(str(EMBEDDED))
    return config, config.layout(name="ess-embedded")


def layers_of(stages: int) -> Layers:
    """The layers of each stage, as `ess prefill` divides them by default."""
    config, layout = embedded()
    parts = partition(layout, stages, costs=counted_costs(config))
    return tuple((part.start, part.stop) for part in parts)


def plan_of(
    layers: Layers, context: int, *, prompts: int = 1, links: Slow | None = None
) -> PipeTrial:
    return PipeTrial(
        model=str(EMBEDDED),
        layers=layers,
        context=context,
        prompts=prompts,
        config=CONFIG,
        links=links,
    )


def text(length: int, *, number: int = 0) -> list[int]:
    """Tokens of the text from a place that `number` chooses; after its end it repeats."""
    ids, _ = token_ids()
    start = number * PROMPT_STRIDE % len(ids)
    turned = ids[start:] + ids[:start]
    return (turned * (length // len(ids) + 1))[:length]


def ends_of(context: int, chunk: int) -> list[int]:
    return list(range(chunk, context + chunk, chunk))


def stage_s(ran: TrialTimes, kind: Kind) -> list[list[float]]:
    return [list(chunk.stage_s(kind)) for chunk in ran.chunks]


def measured(rans: Sequence[TrialTimes], kind: Kind) -> list[MeasuredChunk]:
    return [
        MeasuredChunk(chunk.done, chunk.count, chunk.layer_s(kind))
        for ran in rans
        for chunk in ran.chunks
    ]


def regrouped(ran: TrialTimes, layers: Layers, kind: Kind) -> list[list[float]]:
    """The measured layers as stages that were not run; the last one also has MTP."""
    table = []
    for chunk in ran.chunks:
        each = chunk.layer_s(kind)
        ends = [*(stop for _, stop in layers[:-1]), len(each)]
        table.append([sum(each[a:end]) for (a, _), end in zip(layers, ends, strict=True)])
    return table


def cores() -> int:
    return len(os.sched_getaffinity(0))


def sharing(stages: int) -> str:
    """Whether the wall clock can time this many stages here."""
    if cores() >= stages:
        return "a core for every stage"
    return f"{stages} stages share {cores()} cores: no measure of a pipeline"
