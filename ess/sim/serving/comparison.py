"""A decode GPU among others that serve the same model, replayed with offload and without.

The two differ in what a request must reserve: its floor of slots, or a slot for every row. Device
memory, prefill, arrivals and drafts are the same; host memory holds rows of the first alone. Rates
are given for the replay, and for each of its GPUs: the one that decodes and those that prefill for
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ess.errors import BadInput
from ess.sim.locality.lru_curves import Agreed, Drawing, agreement, lru_curves
from ess.sim.planning.bands import Band
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.prefilling import prefilling_of
from ess.sim.serving.arrivals import OUTPUT_MAX, OUTPUTS_MAX, PROMPT_MAX, Arrival
from ess.sim.serving.asked import Serving
from ess.sim.serving.goodput import Summary, summarise
from ess.sim.serving.prefixes import reused, shared
from ess.sim.serving.replay import Drafting, Replay
from ess.sim.serving.traffic import chance_of
from ess.sim.serving.worker import Size, Sustained, Worker, gpu_count
from ess.sim.step_grid import StepTimes
from ess.units import PAGE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`gpu_count` are the decode GPU and the `prefill` GPUs that feed it, as pipelines x GPUs.

    `prefill_tokens_per_s` is what one prefill GPU computes of an average prompt. `cached_share` of
    all prompt tokens was prefilled before. `sustained` are the rates up to which nine in ten of
    these requests meet the objective, with offload and resident, each with the GPUs that it takes.
    `agreed` has the counted misses beside the published, where they were counted. Steps may be off
    by `band`.
    """

    offload: Summary
    resident: Summary
    gpu_count: int
    prefill: Size | None
    prefill_tokens_per_s: float
    cached_share: float
    band: Band
    marks: tuple[str, ...]
    sustained: tuple[Sustained, Sustained] | None = None
    agreed: tuple[Agreed, ...] = ()


def serve(
    planner: Planner,
    arrivals: Sequence[Arrival],
    serving: Serving,
    *,
    node: Node,
    sustained: bool = False,
) -> tuple[Served, tuple[Replay, Replay]]:
    """With offload and without, over the same requests."""
    check_lengths(arrivals)
    if not planner.is_sparse:
        name = planner.operators.family.name
        raise BadInput(f"{name} attends to every row: with offload and without are the same")
    planner, agreed = _with_misses(planner, serving)
    worker = _worker(planner, arrivals, serving, node)
    floors, size = (planner.slot_floor, None), worker.size(arrivals)
    both = tuple(worker.replayed(arrivals, slot_floor=floor, size=size) for floor in floors)
    offload, resident = (summarise(side, serving.objective) for side in both)
    tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    mean = tokens / len(arrivals)
    rates = [worker.sustained(arrivals, slot_floor=floor) for floor in floors if sustained]
    sample = planner.point(max(1, round(offload.batch_mean)), planner.ask.context)
    served = Served(
        offload=offload,
        resident=resident,
        gpu_count=gpu_count(size),
        prefill=size,
        prefill_tokens_per_s=mean / worker.prefilling.time.of(mean),
        cached_share=sum(worker.cached) / tokens,
        band=sample.band,
        marks=tuple(dict.fromkeys([*sample.marks, *worker.prefilling.marks])),
        sustained=(rates[0], rates[1]) if rates else None,
        agreed=agreed,
    )
    return served, (both[0], both[1])


def check_lengths(arrivals: Sequence[Arrival]) -> None:
    """Before anything of their size is made."""
    prompt = max(arrival.prompt_tokens for arrival in arrivals)
    outputs = [arrival.output_tokens for arrival in arrivals]
    if prompt > PROMPT_MAX:
        raise BadInput(f"a prompt of {prompt:,} tokens, at most {PROMPT_MAX:,}")
    if max(outputs) > OUTPUT_MAX:
        raise BadInput(f"an output of {max(outputs):,} tokens, at most {OUTPUT_MAX:,}")
    if sum(outputs) > OUTPUTS_MAX:
        raise BadInput(
            f"{len(outputs):,} requests make {sum(outputs):,} tokens, a replay {OUTPUTS_MAX:,} "
            "at most: take fewer --requests"
        )


def _with_misses(planner: Planner, serving: Serving) -> tuple[Planner, tuple[Agreed, ...]]:
    if serving.misses == "curve":
        return planner, ()
    drawing = Drawing(queries_each=planner.ask.queries_each, seed=serving.seed)
    counted = lru_curves(planner.curves, drawing)
    return replace(planner, curves=counted), tuple(agreement(counted, planner.curves))


def _worker(planner: Planner, arrivals: Sequence[Arrival], serving: Serving, node: Node) -> Worker:
    ask = planner.ask
    chance = chance_of(ask.tokens_each, depth=ask.queries_each)
    return Worker(
        planner=planner,
        serving=serving,
        node=node,
        times=StepTimes(operators=planner.operators, curves=planner.curves, parallel=ask.way),
        prefilling=prefilling_of(planner),
        drafting=Drafting(chance=chance, seed=serving.seed),
        cached=_cached(planner, arrivals, serving),
    )


def _cached(planner: Planner, arrivals: Sequence[Arrival], serving: Serving) -> list[int]:
    """Prompt tokens reused, per request: no more than the host memory holds, where it is given."""
    if serving.cached_share is not None:
        return shared(arrivals, serving.cached_share)
    layout, host_bytes = planner.layout, planner.ask.host_bytes
    held = None if host_bytes is None else host_bytes // layout.host_page_bytes * PAGE_ROWS
    return reused(arrivals, token_max=held, has_mtp=planner.ask.queries_each > 1)
