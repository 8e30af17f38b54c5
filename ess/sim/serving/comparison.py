"""A decode GPU among others that serve the same model, replayed with offload and without.

The two differ in what a request must reserve: its floor of slots, or a slot for every row. Device
memory, prefill, arrivals and drafts are the same; only the first has rows in host memory. Rates are
given for the replay, and for each of its GPUs: those that decode and those that prefill for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ess.errors import BadInput
from ess.sim.locality.lru_curves import Drawing, MissAgreement, agreement, lru_curves
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.bands import Band
from ess.sim.planning.node import Node
from ess.sim.planning.planner import MISS_FACTORS, Planner
from ess.sim.planning.prefilling import prefilling_of
from ess.sim.serving.arrivals import OUTPUT_MAX, OUTPUTS_MAX, PROMPT_MAX, Arrival
from ess.sim.serving.goodput import Summary, summarise
from ess.sim.serving.prefixes import reused, shared
from ess.sim.serving.replay import Drafting, Replay
from ess.sim.serving.replay_settings import Serving
from ess.sim.serving.traffic import chance_of
from ess.sim.serving.worker import ENDS_STEP, ErrorFactors, Size, SustainedRate, Worker
from ess.sim.step_grid import StepTimes
from ess.units import PAGE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`gpu_count` counts the decode GPU, or those that share its heads, and the `prefill` GPUs, as
    pipelines x GPUs, that feed it.

    `prefill_tokens_per_s` is what one prefill GPU computes of an average prompt. `cached_share` of
    all prompt tokens was cached. `sustained` are the rates up to which nine in ten of these
    requests meet the objective, with offload and resident, each with the GPUs that it takes.
    `agreed` has the counted misses beside the published, if they were counted.

    Steps may be off by `band`, prefill by `prefill_band`. `ends` of both sides are the same replays
    with all times and misses at the good end of their bands, and at the bad end; `gpu_ends` are the
    GPUs with a tier sized by these times, None if no number is enough.
    """

    offload: Summary
    resident: Summary
    offload_ends: tuple[Summary, Summary]
    resident_ends: tuple[Summary, Summary]
    parallel: Parallel
    gpu_count: int
    gpu_ends: tuple[int | None, int | None]
    prefill: Size | None
    prefill_tokens_per_s: float
    cached_share: float
    band: Band
    prefill_band: Band
    marks: tuple[str, ...]
    sustained: tuple[SustainedRate, ...] = ()
    sustained_ends: tuple[tuple[SustainedRate, SustainedRate], ...] = ()
    agreed: tuple[MissAgreement, ...] = ()


def serve(
    planner: Planner,
    arrivals: Sequence[Arrival],
    serving: Serving,
    *,
    node: Node,
    sustained: bool = False,
) -> tuple[Served, tuple[Replay, Replay]]:
    """Replays the same requests with offload and without."""
    check_lengths(arrivals)
    if not planner.is_sparse:
        name = planner.operators.family.name
        raise BadInput(f"{name} attends to every row: with offload and without are the same")
    planner, agreed = _with_misses(planner, serving)
    worker = _worker(planner, arrivals, serving, node)
    size = worker.size(arrivals)
    offload, resident = (
        Side(worker=worker, arrivals=arrivals, size=size, slot_floor=floor)
        for floor in (planner.slot_floor, None)
    )
    both = offload.replayed(ErrorFactors()), resident.replayed(ErrorFactors())
    sums = [summarise(side, serving.objective) for side in both]
    sample = planner.point(max(1, round(sums[0].batch_mean)), planner.ask.context)
    good, bad = _both_ends(sample.token_band, worker.prefilling.band)
    tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    mean = tokens / len(arrivals)
    sides = (offload, resident) if sustained else ()
    rates = [side.sustained() for side in sides]
    served = Served(
        offload=sums[0],
        resident=sums[1],
        offload_ends=(offload.summary(good), offload.summary(bad)),
        resident_ends=(resident.summary(good), resident.summary(bad)),
        gpu_count=worker.gpu_count(size),
        parallel=planner.ask.way,
        gpu_ends=(offload.sized(good), offload.sized(bad)),
        prefill=size,
        prefill_tokens_per_s=mean / worker.prefilling.time.of(mean),
        cached_share=sum(worker.cached) / tokens,
        band=sample.token_band,
        prefill_band=worker.prefilling.band,
        marks=tuple(dict.fromkeys([*sample.marks, *worker.prefilling.marks])),
        sustained=tuple(rates),
        sustained_ends=tuple(
            (side.sustained_at(good, rate), side.sustained_at(bad, rate))
            for side, rate in zip(sides, rates, strict=True)
        ),
        agreed=agreed,
    )
    return served, both


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two sides; its times and misses may be `off` by factors."""

    worker: Worker
    arrivals: Sequence[Arrival]
    size: Size | None
    slot_floor: int | None

    def replayed(self, off: ErrorFactors) -> Replay:
        worker = self.worker.with_errors(off)
        return worker.replayed(self.arrivals, slot_floor=self.slot_floor, size=self.size)

    def summary(self, off: ErrorFactors) -> Summary:
        return summarise(self.replayed(off), self.worker.serving.objective)

    def sustained(self) -> SustainedRate:
        return self.worker.sustained(self.arrivals, slot_floor=self.slot_floor)

    def sustained_at(self, off: ErrorFactors, predicted: SustainedRate) -> SustainedRate:
        """Searched near what was predicted, in larger steps."""
        worker, floor = self.worker.with_errors(off), self.slot_floor
        return worker.sustained(
            self.arrivals, slot_floor=floor, near=predicted.rate, step=ENDS_STEP
        )

    def sized(self, off: ErrorFactors) -> int | None:
        """GPUs with a tier for these times; None if no tier keeps the time to the first token."""
        try:
            return self.worker.gpu_count(self.worker.with_errors(off).size(self.arrivals))
        except BadInput:
            return None


def _both_ends(step: Band, prefill: Band) -> tuple[ErrorFactors, ErrorFactors]:
    """Everything better than predicted, and everything worse: wider than it must be."""
    few, many = MISS_FACTORS
    good = ErrorFactors(step=1 + step[0], prefill=1 + prefill[0], misses=few)
    return good, ErrorFactors(step=1 + step[1], prefill=1 + prefill[1], misses=many)


def check_lengths(arrivals: Sequence[Arrival]) -> None:
    """Refuses lengths before anything of their size is allocated."""
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


def _with_misses(planner: Planner, serving: Serving) -> tuple[Planner, tuple[MissAgreement, ...]]:
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
    """Cached prompt tokens of each request: no more than the host memory holds, if it is given."""
    if serving.cached_share is not None:
        return shared(arrivals, serving.cached_share)
    layout, host_bytes = planner.layout, planner.ask.host_bytes
    held = None if host_bytes is None else host_bytes // layout.host_page_bytes * PAGE_ROWS
    return reused(arrivals, token_max=held, has_mtp=planner.ask.queries_each > 1)
