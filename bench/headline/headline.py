"""`ess-bench --ctx 128k --mtp 2`: this machine's measurements, then predictions for a GPU.

Measured: the embedded model's real decode steps through the real engine at that context, with
offload off and on, in turn. Predicted: the planner's answer for the named model and GPU. Both
halves show the resident baseline; neither is evidence for the other: the first shows that the
engine works at this context, and at what cost, the second what the gain is. The planner is that of
`ess plan`, with its defaults: nodes of 2 TiB, and on each side the best way to share the model.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cyclopts

from ess import console
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import modes, shares, sizes
from ess.bench.harness.output import plots
from ess.bench.harness.output.chrome_trace import write_chrome
from ess.bench.harness.report import Row
from ess.bench.headline.measured import measure
from ess.bench.headline.plan import HeadlineRun, Outcome
from ess.bench.headline.predicted import check_predicted, predict
from ess.console import Whole
from ess.errors import BadInput
from ess.free_resources import memory_free
from ess.layout import ModelLayout
from ess.units import PAGE_ROWS, format_bytes, parse_size

MEMORY_SHARE: Final = 0.6
REPETITIONS_MAX: Final = 1000
SHOWN: Final = {"measured": 0.4, "predicted": 0.08}
"""The share of a step's timeline: three layers of seven, five of sixty-one."""

SMOKE: Final = HeadlineRun(contexts=(320,), predicted=(131_072,), repetitions=2)


@cyclopts.Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFlags:
    """The predicted half: a model, and the GPUs that decode."""

    model: str = "deepseek-v3.2"
    "The model of the predicted half: deepseek-v3.2, glm-5 or glm-5.2."
    gpu: str = "h200"
    "The GPU of the predicted half: h100, h200, b200, gb200, h800 or h20."
    gpus: Whole = 32
    "GPUs that share the experts."
    node_ram: str | None = None
    "Host memory of a node in the predicted half: by default 2TiB for 8 GPUs, 960GB for 4 of gb200."
    accepted: float | None = None
    "Tokens accepted per step in the predicted half; by default 70 % of each draft in turn."

    def planned(self) -> dict[str, Any]:
        """These flags as fields of a plan."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "gpus": self.gpus,
            "node_bytes": self.node_ram and parse_size(self.node_ram, "--node-ram"),
            "accepted": self.accepted,
        }


def headline_benchmark(
    *,
    ctx: str = "128k",
    mtp: str = "2",
    batch: str = "1",
    ratio: str = "0.2",
    mode: str = "layerwise",
    repetitions: int = 5,
    gpus: GpuFlags | None = None,
    text: Path | None = None,
    seconds: float = 120.0,
    trace: Path | None = None,
    plot: Path | None = None,
    smoke: bool = False,
) -> list[Row]:
    """Decode at a context: measured on this machine, predicted for a GPU.

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
        How layers fetch in the measured half: layerwise, none, da or dba.
    repetitions
        Repetitions behind every mean.
    text
        Decode behind this text; by default Python's own reference.
    seconds
        The measured half begins nothing new after this long.
    trace
        Write a timeline of one measured and one predicted step, for Chrome or Perfetto.
    plot
        Draw the plots into this folder; those of a second context end in -2.png.
    """
    console.check_file("--trace", trace)
    plots.check_folder(plot)
    if smoke:
        return run(SMOKE, None, text, trace=trace, plot=plot)
    plan = HeadlineRun(
        contexts=sizes("--ctx", ctx),
        mtps=sizes("--mtp", mtp),
        batches=sizes("--batch", batch),
        ratios=shares("--ratio", ratio),
        mode=modes("--mode", mode)[0],
        repetitions=repetitions,
        **(gpus or GpuFlags()).planned(),
        seconds=seconds,
    )
    check(plan)
    return run(plan, default_folder(), text, trace=trace, plot=plot)


def check(plan: HeadlineRun) -> None:
    """Refuses, before anything runs, what cannot run."""
    if not 1 <= plan.repetitions <= REPETITIONS_MAX:
        raise BadInput(
            f"--repetitions {plan.repetitions}: between 1 and {REPETITIONS_MAX} can be run"
        )
    check_predicted(plan)
    layout = ModelLayout.embedded()
    pages = max(plan.contexts) // PAGE_ROWS * max(plan.batches)
    needed = int(pages * layout.host_page_bytes * (2 + 1 + max(plan.ratios)))
    there = memory_free()
    if needed > MEMORY_SHARE * there:
        raise BadInput(
            f"a batch of {max(plan.batches)} at {max(plan.contexts):,} tokens takes "
            f"{format_bytes(needed)} in both ways together, {format_bytes(there)} are free: "
            "take a smaller --batch or --ctx"
        )


def run(
    plan: HeadlineRun,
    folder: Path | None,
    text: Path | None,
    *,
    trace: Path | None,
    plot: Path | None,
) -> list[Row]:
    outcome = Outcome()
    started = time.monotonic()
    measure(outcome, plan, folder, text, with_spans=bool(trace or plot))
    console.note(f"measured in {time.monotonic() - started:.0f} s; predicting ...")
    for context in plan.predicted or plan.contexts:
        for mtp in plan.mtps:
            predict(outcome, plan, context, mtp)
    draw(outcome, trace=trace, plot=plot)
    return outcome.rows


def draw(outcome: Outcome, *, trace: Path | None, plot: Path | None) -> None:
    if trace is not None:
        write_chrome(trace, outcome.timelines)
        console.note(f"written: {trace}")
    if plot is None:
        return
    for place, curves in enumerate(outcome.curves, 1):
        plots.draw_curves(curves, plot, after=_after(place))
    drawn = Counter[str]()
    for title, spans in outcome.timelines:
        half = title.partition(":")[0]
        drawn[half] += 1
        path = plot / f"timeline-{half}{_after(drawn[half])}.png"
        plots.draw_timeline(path, title, spans, share=SHOWN[half])


def _after(place: int) -> str:
    return f"-{place}" if place > 1 else ""
