"""`ess-bench --ctx 128k --mtp 2`: what this machine measured, then what a GPU is predicted to do.

Measured: the embedded model's real decode steps through the real engine at that context, offload
off and on, in turn. Predicted: the planner's answer for the named model and GPU. Both halves have
the resident baseline beside them; neither is evidence for the other: the first shows that the
engine does at this context what it is supposed to, and at what cost, the second what it is for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal


def headline(
    *,
    ctx: str,
    mtp: str = "2",
    batch: str = "1",
    ratio: str = "0.2",
    mode: str = "layerwise",
    repetitions: int = 5,
    model: str = "deepseek-v3.2",
    gpu: str = "h200",
    gpus: int = 32,
    accepted: float | None = None,
    text: Path | None = None,
    seconds: float = 120.0,
    format: Literal["md", "csv", "json", "jsonl"] = "md",
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
        How layers fetch in the measured half: layerwise, none, da or dba.
    repetitions
        Repetitions behind every mean.
    model
        The model of the predicted half.
    gpu
        The GPU of the predicted half: h100 or h200.
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
    given = dict(locals())
    importlib.import_module("ess.bench.headline.document").execute(**given)
