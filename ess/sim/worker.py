"""A decode GPU among others that serve the same model, replayed with offload and without.

The two differ in what a request must reserve: its floor of slots, or a slot for every row. Device
memory, prefill, arrivals and drafts are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ess.engine.chunking import PrefillTime
from ess.errors import BadInput
from ess.sim import prefilltime
from ess.sim.arrivals import Arrival
from ess.sim.capacity import SLOTS
from ess.sim.goodput import Objective, Summary, summarise
from ess.sim.lrucurves import Agreed, Drawing, agreement, lru_curves
from ess.sim.misses import PUBLISHED_QUERIES
from ess.sim.operators import TOP_K
from ess.sim.plan import Planner
from ess.sim.prefilltime import Handoff, Tier
from ess.sim.rank import Missed, Rank
from ess.sim.replay import WAITING_MAX, Drafting, replay
from ess.sim.steptime import StepTimes
from ess.sim.traffic import chance_of
from ess.units import PAGE_ROWS

MissesBy = Literal["curve", "lru"]

PROMPT_MAX: Final = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """`tier` is pipelines x GPUs of each for every decode GPU; None prefills beside decode.

    `misses` are read off the published curves, or counted in the product's planner ("lru").
    With `is_paced` the engine decides depth, batch and chunk for the objective's time per token.
    """

    objective: Objective
    tier: tuple[int, int] | None = None
    misses: MissesBy = "curve"
    is_paced: bool = False
    batch_max: int = 512
    chunk_tokens: int = 512
    waiting_max: int = WAITING_MAX
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.batch_max, self.chunk_tokens) < 1 or self.waiting_max < 0:
            asked = f"batch {self.batch_max}, chunk {self.chunk_tokens}, waiting {self.waiting_max}"
            raise BadInput(f"{asked}: a batch and a chunk hold at least 1, none waits below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`prefill_tokens_per_s` is what one prefill GPU computes of an average prompt.

    `agreed` has the counted misses beside the published, where they were counted.
    """

    offload: Summary
    resident: Summary
    prefill_tokens_per_s: float
    agreed: tuple[Agreed, ...] = ()


def serve(planner: Planner, arrivals: Sequence[Arrival], serving: Serving) -> Served:
    """Both ways, over the same requests."""
    ask = planner.ask
    longest = max(arrivals, key=lambda one: one.prompt_tokens)
    if longest.prompt_tokens > PROMPT_MAX:
        raise BadInput(f"a prompt of {longest.prompt_tokens:,} tokens, at most {PROMPT_MAX:,}")
    planner, agreed = _with_misses(planner, serving)
    times = StepTimes(operators=planner.operators, curves=planner.curves, ranks=ask.gpu_count)
    time = prefilltime.estimate(planner.layout, planner.operators.machine)
    chance = chance_of(ask.tokens_each, depth=ask.queries_each)
    drafting = Drafting(chance=chance, seed=serving.seed)
    both = []
    for slot_floor in (planner.layout.slot_floor, None):
        rank = rank_of(planner, arrivals, serving, times=times, time=time, slot_floor=slot_floor)
        found = replay(
            arrivals,
            rank,
            tier=_tier(planner, serving, time),
            drafting=drafting,
            waiting_max=serving.waiting_max,
        )
        both.append(summarise(found, serving.objective))
    mean = sum(one.prompt_tokens for one in arrivals) / len(arrivals)
    return Served(
        offload=both[0], resident=both[1], prefill_tokens_per_s=mean / time.of(mean), agreed=agreed
    )


def _with_misses(planner: Planner, serving: Serving) -> tuple[Planner, tuple[Agreed, ...]]:
    if serving.misses == "curve":
        return planner, ()
    drawing = Drawing(queries_each=planner.ask.queries_each, seed=serving.seed)
    counted = lru_curves(planner.curves, drawing)
    return replace(planner, curves=counted), tuple(agreement(counted, planner.curves))


def rank_of(
    planner: Planner,
    arrivals: Sequence[Arrival],
    serving: Serving,
    *,
    times: StepTimes,
    time: PrefillTime,
    slot_floor: int | None,
) -> Rank:
    lengths = [one.prompt_tokens + one.output_tokens for one in arrivals]
    budget = planner.budget
    return Rank(
        make_ledger=lambda: budget.split_for(lengths, slot_floor=slot_floor),
        slot_count=budget.split_for(lengths, slot_floor=slot_floor).free(SLOTS),
        slot_floor=slot_floor,
        times=times,
        missed=missed_by(planner),
        depth=planner.ask.queries_each,
        target_ms=serving.objective.tpot_s * 1e3 if serving.is_paced else None,
        batch_max=serving.batch_max,
        chunk_max=serving.chunk_tokens,
        chunk_time=time if serving.tier is None else None,
    )


def missed_by(planner: Planner) -> Missed:
    """The curves, for the tokens that a step verifies."""
    queries, curves = planner.ask.queries_each, planner.curves

    def missed(length: int, slots: float) -> float:
        mean = curves.mean(context=length, slots=slots) * queries / PUBLISHED_QUERIES
        return min(mean, float(queries * TOP_K))

    return missed


def _tier(planner: Planner, serving: Serving, time: PrefillTime) -> Tier | None:
    if serving.tier is None:
        return None
    layout = planner.layout
    pipelines, stages = serving.tier
    return Tier(
        pipelines=pipelines,
        stages=stages,
        time=time,
        handoff=Handoff(
            token_bytes=layout.host_page_bytes // PAGE_ROWS,
            index_page_bytes=planner.budget.index_page_bytes,
            link_rate=planner.operators.machine.link_rate,
        ),
        layer_count=layout.layer_count,
    )
