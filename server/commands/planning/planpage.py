"""The planner as a page that needs no server: numbers simulated here, plans made in a browser.

Capacity is a few lines of arithmetic, which the page has too (plan.js). Step times come from the
simulator; the page has them on a grid of context, batch and slots, for every MTP depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import ess
from ess.server.commands.planning.htmlfile import whole
from ess.sim.planning.answers import Question
from ess.sim.planning.batches import Point
from ess.sim.planning.planner import WORTH, Planner
from ess.sim.planning.prefilling import prefilling_of

MTPS: Final = (1, 2, 4)
CONTEXTS: Final = (8192, 16384, 32768, 65536, 131072, 262144)
BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 224, 320, 512)
SLOTS: Final = (6400, 8192, 12288, 16384, 24576, 49152, 131072)


def page(planner: Planner, question: Question, *, model: str, gpu: str) -> str:
    """The whole page, self-contained."""
    numbers = numbers_of(planner, question, model=model, gpu=gpu)
    return whole("plan", title="ESS plan", numbers=numbers, code="plan.js")


def numbers_of(
    planner: Planner,
    question: Question,
    *,
    model: str,
    gpu: str,
    mtps: Sequence[int] = MTPS,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    slots: Sequence[int] = SLOTS,
) -> dict[str, Any]:
    """The numbers that plan.js reads. The grid ends where the memory of a GPU ends."""
    ask, budget = planner.ask, planner.budget
    depths = sorted({*mtps, ask.queries_each})
    lengths = sorted({*contexts, ask.context})
    grids = [_grids(planner, mtp, lengths, batches, slots) for mtp in depths]
    low, high = (100 * side for side in planner.plan().chosen.token_band)
    return {
        "model": model,
        "gpu": gpu,
        "gpus": ask.gpu_count,
        "about": f"ess {ess.__version__}. Times are the simulator's, read between grid points. As "
        f"first shown, a time per token may be off by {low:+.0f} to {high:+.0f} %, with other "
        "inputs by more or less.",
        "ask": {
            "context": ask.context,
            "out": question.work.output_tokens,
            "cached": question.work.cached_share,
            "mtp": ask.queries_each,
            "accepted": ask.accepted,
            "tpot_us": ask.token_us_max,
            "host_bytes": ask.host_bytes,
            "batch": ask.batch,
        },
        "prefill": _prefill(planner, question),
        "device_bytes": planner.device_bytes,
        "slot_bytes": budget.slot_bytes,
        "index_page_bytes": budget.index_page_bytes,
        "host_page_bytes": planner.layout.host_page_bytes,
        "slot_floor": planner.layout.slot_floor,
        "top_k": planner.layout.top_k,
        "worth": WORTH,
        "mtps": depths,
        "contexts": lengths,
        "batches": list(batches),
        "slots": list(slots),
        "step_us": [steps for steps, _ in grids],
        "exposed_us": [exposed for _, exposed in grids],
    }


def _prefill(planner: Planner, question: Question) -> dict[str, float]:
    prefilling, node = prefilling_of(planner), question.node
    nic_rate = node.nic_rate / node.neighbours(planner.ask.gpu_count)
    return {
        "quadratic": prefilling.time.quadratic,
        "linear": prefilling.time.linear,
        "group_gpus": prefilling.group_gpus,
        "nic_bytes_per_s": nic_rate * 1e6,
    }


def _grids(
    planner: Planner,
    mtp: int,
    contexts: Sequence[int],
    batches: Sequence[int],
    slots: Sequence[int],
) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Step times with everything resident [context][batch], and what slots add [..][..][slots]."""
    steps, exposed = [], []
    for context in contexts:
        ask = replace(planner.ask, context=context, queries_each=mtp, batch=None, accepted=None)
        here = replace(planner, ask=ask)
        wholes = [here.point(batch, context) for batch in batches]
        steps.append([_rounded(whole.step_us) for whole in wholes])
        exposed.append([_added(here, whole, slots) for whole in wholes])
    return steps, exposed


def _added(planner: Planner, whole: Point, slots: Sequence[int]) -> list[float]:
    """The time that each count of slots adds; zeros for batches far beyond what fits."""
    if whole.batch * planner.budget.index_bytes(context=planner.ask.context, batch=1) > (
        2 * planner.device_bytes
    ):
        return [0.0] * len(slots)
    return [
        _rounded(planner.point(whole.batch, count).step_us - whole.step_us)
        if count < planner.ask.context
        else 0.0
        for count in slots
    ]


def _rounded(value: float) -> float:
    return round(value, 1)
