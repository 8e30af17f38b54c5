"""A decode GPU among others that serve the same model, replayed with offload and without.

The two differ in what a request must reserve: its floor of slots, or a slot for every row. Device
memory, prefill, arrivals and drafts are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ess.engine.chunking.sizes import PrefillTime
from ess.errors import BadInput
from ess.pool.capacity import SLOTS
from ess.sim.locality.lru_curves import Agreed, Drawing, agreement, lru_curves
from ess.sim.locality.misses import PUBLISHED_QUERIES
from ess.sim.operators.paper import TOP_K
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.planner import Planner
from ess.sim.prefill import prefill_time
from ess.sim.prefill.prefill_time import Handoff, Tier
from ess.sim.serving.arrivals import OUTPUT_MAX, OUTPUTS_MAX, PROMPT_MAX, Arrival
from ess.sim.serving.decode_rank import Rank
from ess.sim.serving.goodput import Objective, Summary, summarise
from ess.sim.serving.prefixes import reused, shared
from ess.sim.serving.replay import WAITING_MAX, Drafting, replay
from ess.sim.serving.traffic import at_rate, chance_of, check_seed
from ess.sim.step_grid import StepTimes
from ess.units import PAGE_ROWS

MissesBy = Literal["curve", "lru"]

GOOD_SHARE: Final = 0.9
RATE_MIN: Final = 1 / 64
RATE_MAX: Final = 64.0
RATE_STEP: Final = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """`tier` is pipelines x GPUs of each for every decode GPU; None prefills beside decode.

    Cached prompt tokens are those of blocks that a trace names, or this share of every prompt.
    `misses` are read off the published curves, or counted in the product's planner ("lru").
    With `is_paced` the engine decides depth, batch and chunk for the objective's time per token.
    """

    objective: Objective
    tier: tuple[int, int] | None = None
    cached_share: float | None = None
    misses: MissesBy = "curve"
    is_paced: bool = False
    batch_max: int = 512
    chunk_tokens: int = 512
    waiting_max: int = WAITING_MAX
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch_max, self.chunk_tokens) < 1 or self.waiting_max < 0:
            asked = f"batch {self.batch_max}, chunk {self.chunk_tokens}, waiting {self.waiting_max}"
            raise BadInput(f"{asked}: batch and chunk must be 1 or more, waiting 0 or more")
        check_seed(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`prefill_tokens_per_s` is what one prefill GPU computes of an average prompt.

    `cached_share` of all prompt tokens was prefilled before. `sustained` are the rates up to which
    nine in ten of these requests meet the objective, with offload and resident. `agreed` has the
    counted misses beside the published, where they were counted.
    """

    offload: Summary
    resident: Summary
    prefill_tokens_per_s: float
    cached_share: float
    sustained: tuple[float, float] | None = None
    agreed: tuple[Agreed, ...] = ()


def serve(
    planner: Planner, arrivals: Sequence[Arrival], serving: Serving, *, sustained: bool = False
) -> Served:
    """With offload and without, over the same requests."""
    check_lengths(arrivals)
    planner, agreed = _with_misses(planner, serving)
    worker = _worker(planner, arrivals, serving)
    floors = (planner.slot_floor, None)
    offload, resident = (worker.summary(arrivals, slot_floor=floor) for floor in floors)
    tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    mean = tokens / len(arrivals)
    rates = [worker.sustained(arrivals, slot_floor=floor) for floor in floors if sustained]
    return Served(
        offload=offload,
        resident=resident,
        prefill_tokens_per_s=mean / worker.time.of(mean),
        cached_share=sum(worker.cached) / tokens,
        sustained=(rates[0], rates[1]) if rates else None,
        agreed=agreed,
    )


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


def _worker(planner: Planner, arrivals: Sequence[Arrival], serving: Serving) -> _Worker:
    ask = planner.ask
    chance = chance_of(ask.tokens_each, depth=ask.queries_each)
    return _Worker(
        planner=planner,
        serving=serving,
        times=StepTimes(
            operators=planner.operators,
            curves=planner.curves,
            parallel=Parallel.wide(ask.gpu_count),
        ),
        time=prefill_time.estimate(planner.layout, planner.operators.machine),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """What both replays share. Without a `slot_floor` every row has a slot."""

    planner: Planner
    serving: Serving
    times: StepTimes
    time: PrefillTime
    drafting: Drafting
    cached: list[int]

    def summary(self, arrivals: Sequence[Arrival], *, slot_floor: int | None) -> Summary:
        replayed = replay(
            arrivals,
            self.rank(arrivals, slot_floor=slot_floor),
            tier=self.tier(),
            drafting=self.drafting,
            waiting_max=self.serving.waiting_max,
            cached=self.cached,
        )
        return summarise(replayed, self.serving.objective)

    def sustained(self, arrivals: Sequence[Arrival], *, slot_floor: int | None) -> float:
        """The highest rate, to 5 %, at which enough requests meet the objective; 0 if none does.

        The same requests arrive closer together or further apart. `RATE_MAX` means that they are
        few enough to run all at once. The search assumes that a rank which sustains a rate
        sustains every lower rate too.
        """

        def is_met(rate: float) -> bool:
            stretched = at_rate(arrivals, rate)
            return self.summary(stretched, slot_floor=slot_floor).good_share >= GOOD_SHARE

        low, high = RATE_MIN, RATE_MAX
        if not is_met(low):
            return 0.0
        if is_met(high):
            return high
        while high / low > RATE_STEP:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_met(middle) else (low, middle)
        return low

    def rank(self, arrivals: Sequence[Arrival], *, slot_floor: int | None) -> Rank:
        lengths = [arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals]
        serving, planner = self.serving, self.planner
        budget = planner.device_budget if slot_floor is None else planner.budget
        return Rank(
            make_ledger=lambda: budget.split_for(lengths, slot_floor=slot_floor),
            slot_count=budget.split_for(lengths, slot_floor=slot_floor).free(SLOTS),
            slot_floor=slot_floor,
            times=self.times,
            missed=self.missed,
            depth=self.planner.ask.queries_each,
            target_ms=serving.objective.tpot_s * 1e3 if serving.is_paced else None,
            batch_max=serving.batch_max,
            chunk_max=serving.chunk_tokens,
            chunk_time=self.time if serving.tier is None else None,
        )

    def missed(self, length: int, slots: float) -> float:
        """The curves, for the tokens that a step verifies."""
        queries = self.planner.ask.queries_each
        mean = self.planner.curves.mean(context=length, slots=slots)
        return min(mean * queries / PUBLISHED_QUERIES, float(queries * TOP_K))

    def tier(self) -> Tier | None:
        if self.serving.tier is None:
            return None
        layout = self.planner.layout
        pipelines, stages = self.serving.tier
        return Tier(
            pipelines=pipelines,
            stages=stages,
            time=self.time,
            handoff=Handoff(
                token_bytes=layout.host_page_bytes // PAGE_ROWS,
                index_page_bytes=self.planner.budget.index_page_bytes,
                link_rate=self.planner.operators.machine.link_rate,
            ),
            layer_count=layout.layer_count,
        )
