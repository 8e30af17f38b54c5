"""The headline's two halves put together: options in, one document out."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ess import console
from ess.bench.harness import machine, plots, report
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import modes, shares, sizes
from ess.bench.harness.report import Format, Row
from ess.bench.harness.trace_file import write_chrome
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim.operators.gpus import check_planned
from ess.units import PAGE_ROWS, format_bytes

if TYPE_CHECKING:
    from ess.bench.headline.predicted import Curves
    from ess.sim.timeline import Span

MEMORY_SHARE: Final = 0.6
SHOWN: Final = {"measured": 0.4, "predicted": 0.08}
"""Of a step's timeline: three layers of seven, five of sixty-one."""

HALVES: Final = ("ess.bench.headline.measured", "ess.bench.headline.predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    contexts: Sequence[int]
    mtps: Sequence[int] = (2,)
    batches: Sequence[int] = (1,)
    ratios: Sequence[float] = (0.2,)
    mode: str = "layerwise"
    repetitions: int = 5
    steps: int = 8
    model: str = "deepseek-v3.2"
    gpu: str = "h200"
    gpus: int = 32
    accepted: float | None = None
    seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    rows: list[Row]
    timelines: list[tuple[str, list[Span]]]
    curves: list[Curves]


def execute(
    *,
    ctx: str,
    mtp: str,
    batch: str,
    ratio: str,
    mode: str,
    repetitions: int,
    model: str,
    gpu: str,
    gpus: int,
    accepted: float | None,
    text: Path | None,
    seconds: float,
    format: Format,
    trace: Path | None,
    plot: Path | None,
    out: Path | None,
) -> None:
    """`ess.bench.headline.command` says what the options mean."""
    for option, path in (("--trace", trace), ("--plot", plot), ("--out", out)):
        console.check_folder(option, path)
    if plot is not None:
        plots.require()
    plan = Plan(
        contexts=sizes("--ctx", ctx),
        mtps=sizes("--mtp", mtp),
        batches=sizes("--batch", batch),
        ratios=shares("--ratio", ratio),
        mode=modes("--mode", mode)[0],
        repetitions=repetitions,
        model=model,
        gpu=gpu,
        gpus=gpus,
        accepted=accepted,
        seconds=seconds,
    )
    check(plan)
    measured_on = machine.machine()
    found = run(plan, folder=default_folder(), text=text, with_spans=bool(trace or plot))
    document = report.Document(build=machine.build(), machine=measured_on, rows=found.rows)
    if trace is not None:
        write_chrome(trace, found.timelines)
        console.note(f"written: {trace}")
    if plot is not None:
        _draw(found, plot)
    report.present(document, form=format, out=out)


def check(plan: Plan) -> None:
    """All that can be refused is refused before anything runs."""
    check_planned(plan.model, plan.gpu)
    if plan.repetitions < 1:
        raise BadInput(f"--repetitions {plan.repetitions}: at least one is needed")
    layout = ModelLayout.embedded()
    pages = max(plan.contexts) // PAGE_ROWS * max(plan.batches)
    needed = int(pages * layout.host_page_bytes * (2 + 1 + max(plan.ratios)))
    there = machine.free_bytes()
    if needed > MEMORY_SHARE * there:
        raise BadInput(
            f"a batch of {max(plan.batches)} at {max(plan.contexts):,} tokens takes "
            f"{format_bytes(needed)} in both ways together, {format_bytes(there)} are free: "
            "take a smaller --batch or --ctx"
        )


def run(plan: Plan, *, folder: Path | None, text: Path | None, with_spans: bool) -> Found:
    """The halves are imported by name when they run: the first brings torch in."""
    measured, predicted = map(importlib.import_module, HALVES)
    found = Found(rows=[], timelines=[], curves=[])
    started = time.monotonic()
    measured.measure(found, plan, folder, text, with_spans=with_spans)
    console.note(f"measured in {time.monotonic() - started:.0f} s; predicting ...")
    for context in plan.contexts:
        for mtp in plan.mtps:
            predicted.predict(found, plan, context, mtp)
    return found


def _draw(found: Found, folder: Path) -> None:
    for curves in found.curves[:1]:
        plots.draw_curves(curves, folder)
    for title, spans in found.timelines:
        half = title.partition(":")[0]
        share = SHOWN[half]
        plots.draw_timeline(folder / f"timeline-{half}.png", title, spans, share=share)
