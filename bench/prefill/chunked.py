"""Dynamic chunks against static ones, each the best of its kind by measurement.

Up to the measured lengths, both kinds of chunks are run and their layers are timed; the layers are
then combined into any number of stages on the virtual clock. Beyond, the fit gives the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ess import console
from ess.bench.harness.report import Row, compare
from ess.bench.prefill.rig import (
    ends_of,
    layers_of,
    measured,
    plan_of,
    regrouped,
    sharing,
    text,
)
from ess.prefill.trial.pipe import Kind, Pipe, TrialTimes, kind_for
from ess.sim.prefill.measured import Model, modelled
from ess.sim.prefill.tuning import Setting, best_dynamic, best_static, forecast, on_clock

STAGES: Final = 4
REAL_STAGES: Final = 2
PROFILED: Final = (256, 1024, 2048)
CHUNK_MAX: Final = 4096


def chunk_rows(contexts: Sequence[int], real: Sequence[int], *, rounds: int) -> list[Row]:
    """`real` are the contexts that are run; longer ones of `contexts` are calculated."""
    longest, kind, layers = max(real), kind_for(STAGES), layers_of(REAL_STAGES)
    rows = []
    with Pipe(plan_of(layers, longest)) as pipe:
        model = modelled(measured(_profile(pipe, longest), kind))
        for context in real:
            rows += _measured_rows(pipe, model, context, rounds=rounds, kind=kind)
    further = [context for context in contexts if context > longest]
    return [*rows, *(_calculated(model, context, longest) for context in further)]


def _profile(pipe: Pipe, context: int) -> list[TrialTimes]:
    console.note(f"  profile of {context:,} tokens, chunks of {PROFILED} ...")
    pipe.run([text(PROFILED[0] + 1)], [PROFILED[0]])
    return [pipe.run([text(context)], ends_of(context, chunk)) for chunk in PROFILED]


def best_of(model: Model, context: int) -> tuple[Setting, Setting]:
    """The best dynamic and the best static setting for one prompt of this length."""
    layers = layers_of(STAGES)
    return (
        best_dynamic(model, layers, context, chunk_max=CHUNK_MAX),
        best_static(model, layers, context, chunk_max=CHUNK_MAX),
    )


def _measured_rows(pipe: Pipe, model: Model, context: int, *, rounds: int, kind: Kind) -> list[Row]:
    pair = best_of(model, context)
    console.note(f"  {context:,} tokens, {_shown(pair[0])} and {_shown(pair[1])} ...")
    arms: tuple[list[TrialTimes], list[TrialTimes]] = ([], [])
    for number in range(rounds):
        for setting, arm in zip(pair, arms, strict=True):
            ends = setting.ends(model.time, context - 1)
            arm.append(pipe.run([text(context, number=number)], ends))
    layers = layers_of(STAGES)
    clocks = [[on_clock(regrouped(ran, layers, kind)).span_s for ran in arm] for arm in arms]
    walls = [[ran.span_s for ran in arm] for arm in arms]
    config = {"dynamic": _shown(pair[0]), "chunks": [len(arm[0].chunks) for arm in arms]}
    return [
        compare(
            name=f"dynamic chunks, PP{STAGES}, {context:,} tokens, virtual clock",
            unit="s",
            ours=clocks[0],
            baseline=(_shown(pair[1]), clocks[1]),
            config={**config, "times": f"measured, {kind}"},
        ),
        compare(
            name=f"dynamic chunks, PP{REAL_STAGES}, {context:,} tokens, wall clock",
            unit="s",
            ours=walls[0],
            baseline=(_shown(pair[1]), walls[1]),
            config={**config, "cores": sharing(REAL_STAGES), "chosen_for": f"PP{STAGES}"},
        ),
    ]


def _calculated(model: Model, context: int, longest: int) -> Row:
    pair = best_of(model, context)
    dynamic, static = (forecast(model, setting, context - 1) for setting in pair)
    return compare(
        name=f"dynamic chunks, PP{STAGES}, {context:,} tokens, CALCULATED",
        unit="s",
        ours=[dynamic.first_token_s],
        baseline=(_shown(pair[1]), [static.first_token_s]),
        config={
            "times": f"fitted, measured up to {longest:,} tokens",
            "fit_error": f"{model.error:.1%}",
            "dynamic": _shown(pair[0]),
            "chunks": [dynamic.chunk_count, static.chunk_count],
            "bubble_share": [round(dynamic.bubble_share, 3), round(static.bubble_share, 3)],
        },
    )


def _shown(setting: Setting) -> str:
    if not setting.is_dynamic:
        return f"static {setting.first}"
    return f"dynamic {setting.first}, smooth {setting.smoothing:g}"
