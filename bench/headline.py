"""`ess-bench --ctx 128k --mtp 2`: what this machine measured, then what a GPU is predicted to do.

Measured: the embedded model's real decode steps through the real engine at that context, offload
off and on, in turn. Predicted: the planner's answer for the named model and GPU. Both halves have
the resident baseline beside them; neither is evidence for the other: the first shows that the
engine does at this context what it is supposed to, and at what cost, the second what it is for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ess import console
from ess.bench import machine, report
from ess.bench.chrome import write_chrome
from ess.bench.folders import default_folder
from ess.bench.lists import shares, sizes
from ess.bench.report import Format, Row
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim.plan import is_planned
from ess.units import PAGE_ROWS, format_bytes

if TYPE_CHECKING:
    from ess.bench.predicted import Curves
    from ess.sim.timeline import Span

SECONDS: Final = 150.0
MEMORY_SHARE: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    contexts: Sequence[int]
    mtps: Sequence[int] = (2,)
    batches: Sequence[int] = (1,)
    ratios: Sequence[float] = (0.2,)
    mode: str = "none"
    repetitions: int = 5
    steps: int = 8
    model: str = "deepseek-v3.2"
    gpu: str = "h200"
    gpus: int = 32
    accepted: float | None = None
    seconds: float = SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    rows: list[Row]
    timelines: list[tuple[str, list[Span]]]
    curves: list[Curves]


def headline(
    *,
    ctx: str,
    mtp: str = "2",
    batch: str = "1",
    ratio: str = "0.2",
    mode: str = "none",
    repetitions: int = 5,
    model: str = "deepseek-v3.2",
    gpu: str = "h200",
    gpus: int = 32,
    accepted: float | None = None,
    text: Path | None = None,
    seconds: float = SECONDS,
    format: Format = "md",
    trace: Path | None = None,
    plot: Path | None = None,
    out: Path | None = None,
) -> None:
    """Decode at a context: measured on this machine, predicted for a GPU. Or name a suite.

    Parameters
    ----------
    ctx
        Contexts: 128k, a list or a range such as 32k-128k*2.
    mtp
        Tokens verified per step, a list or a range.
    batch
        Requests per step of the measured half, a list or a range.
    ratio
        Slots over context of the measured half, a list.
    mode
        How layers fetch in the measured half.
    repetitions
        Repetitions behind every mean.
    model
        The model of the predicted half.
    gpu
        The GPU of the predicted half.
    gpus
        GPUs that share the experts.
    accepted
        Tokens accepted per step in the predicted half; by default 70 % of each draft in turn.
    text
        Decode behind this text; by default Python's own reference.
    seconds
        The measured half begins nothing new after this long.
    format
        md, csv, json or jsonl.
    trace
        Write a timeline of one measured and one predicted step, for Chrome or Perfetto.
    plot
        Draw the plots into this folder.
    out
        Also write the JSON document to this file.
    """
    for option, path in (("--trace", trace), ("--plot", plot), ("--out", out)):
        console.check_folder(option, path)
    if plot is not None:
        from ess.bench import plots

        plots.require()
    plan = Plan(
        contexts=sizes("--ctx", ctx),
        mtps=sizes("--mtp", mtp),
        batches=sizes("--batch", batch),
        ratios=shares("--ratio", ratio),
        mode=mode,
        repetitions=repetitions,
        model=model,
        gpu=gpu,
        gpus=gpus,
        accepted=accepted,
        seconds=seconds,
    )
    check(plan)
    measured_on = machine.machine()
    found = run(plan, folder=default_folder(), text=text, with_spans=trace is not None)
    document = report.Document(build=machine.build(), machine=measured_on, rows=found.rows)
    if trace is not None:
        write_chrome(trace, found.timelines)
        console.note(f"written: {trace}")
    if plot is not None:
        _draw(found, plot)
    report.present(document, form=format, out=out)


def check(plan: Plan) -> None:
    """All that can be refused is refused before anything runs."""
    if not is_planned(plan.model, plan.gpu):
        raise BadInput(
            f"no operator tables for {plan.model!r} on {plan.gpu!r}; there are deepseek-v3.2, h200"
        )
    if plan.repetitions < 1:
        raise BadInput(f"--repetitions {plan.repetitions}: at least one is needed")
    layout = ModelLayout.embedded()
    pages = max(plan.contexts) // PAGE_ROWS * max(plan.batches)
    needed = int(pages * layout.host_page_bytes * (2 + 1 + max(plan.ratios)))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if needed > MEMORY_SHARE * there:
        raise BadInput(
            f"a batch of {max(plan.batches)} at {max(plan.contexts):,} tokens takes "
            f"{format_bytes(needed)} in both ways together, {format_bytes(there)} are free: "
            "take a smaller --batch or --ctx"
        )


def run(plan: Plan, *, folder: Path | None, text: Path | None, with_spans: bool) -> Found:
    from ess.bench import measured, predicted

    found = Found(rows=[], timelines=[], curves=[])
    started = time.monotonic()
    measured.measure(found, plan, folder, text, with_spans=with_spans)
    console.note(f"measured in {time.monotonic() - started:.0f} s; predicting ...")
    for context in plan.contexts:
        for mtp in plan.mtps:
            predicted.predict(found, plan, context, mtp)
    return found


def _draw(found: Found, folder: Path) -> None:
    from ess.bench import plots

    for curves in found.curves[:1]:
        plots.draw_curves(curves, folder)
    for title, spans in found.timelines[-1:]:
        plots.draw_timeline(spans, title, folder)
