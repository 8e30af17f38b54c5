"""The status that an engine process sends to its server a few times a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ess.door.stats import Stats
from ess.engine.process.driven import Driven
from ess.engine.process.holding import Holding
from ess.engine.process.messages import HandoffStatus, PoolUse, RequestLine, Status
from ess.engine.process.wire import open_counts
from ess.engine.requests.request import Request
from ess.errors import EssError, PoolFull
from ess.layout import ModelLayout
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SEQUENCES, SLOTS, WINDOW_SLOTS

SHOWN_MAX: Final = 64
RAISE: Final = {
    SLOTS: "raise slot_bytes",
    WINDOW_SLOTS: "raise slot_bytes",
    INDEX_PAGES: "raise index_bytes, or host_bytes where that is auto",
    HOST_PAGES: "raise host_bytes",
    SEQUENCES: "raise max_running",
}
"""What makes room, in the settings of a server."""


def in_words(refusal: EssError) -> str:
    """Why a request waits or was refused, as a sentence for clients and operators."""
    if not isinstance(refusal, PoolFull) or refusal.limiter not in RAISE:
        return str(refusal)
    return f"{refusal.shortage}; {RAISE[refusal.limiter]}"


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that a front waits for, under its number, the name that its client knows and that
    of its call."""

    number: int
    request: Request
    name: str
    call: str
    began_s: float
    is_admitted: bool = False


@dataclass(slots=True)
class LoopCounts:
    """Since the start: requests in steps, tokens that were made, those of prompts, and those of
    them that were cached. `step_s` is the time of the latest step."""

    turn_count: int = 0
    made_count: int = 0
    prompt_count: int = 0
    cached_count: int = 0
    step_s: float = 0.0


def status_of(
    engine: Driven,
    lives: Sequence[LiveRequest],
    counts: LoopCounts,
    *,
    now_s: float,
    front_count: int,
    handoff: HandoffStatus | None,
    holding: Holding,
) -> Status:
    states = [live.request.state for live in lives]
    short = engine.refusal if "waiting" in states else None
    stats = engine.offload.stats()
    return Status(
        step_count=engine.step_count,
        turn_count=counts.turn_count,
        step_s=counts.step_s,
        running_count=states.count("prefilling") + states.count("decoding"),
        waiting_count=sum(state in ("waiting", "landing", "loading") for state in states),
        preempted_count=states.count("preempted"),
        preemption_count=engine.preempted_count,
        made_count=counts.made_count,
        prompt_count=counts.prompt_count,
        cached_count=counts.cached_count,
        limiter=short.limiter if short is not None else None,
        shortage=in_words(short) if short is not None else "",
        pools=_pools(engine.offload.layout, stats),
        hits=tuple(stats.hit_count.tolist()),
        misses=tuple(stats.miss_count.tolist()),
        places=tuple(stats.place_count.tolist()),
        fetched_bytes=tuple(stats.fetched_bytes.tolist()),
        stored_bytes=tuple(stats.stored_bytes.tolist()),
        slots_used=tuple(stats.used_slot_count.tolist()),
        slots=tuple(stats.slot_count.tolist()),
        modes=tuple(tuple(each) for each in engine.tuning.mode_counts.tolist()),
        transfer_us=tuple((stats.transfer_ns // 1000).tolist()),
        exposed_us=tuple((stats.exposed_ns // 1000).tolist()),
        verified_count=engine.verifier.checked_count,
        mismatch_count=engine.verifier.mismatch_count,
        landed_hits=tuple(engine.warmth.hits.tolist()),
        landed_asked=tuple(engine.warmth.asked.tolist()),
        requests=tuple(_line(live, now_s) for live in lives[:SHOWN_MAX]),
        depth=engine.depth,
        depth_reasons=engine.depth_reasons(),
        open_counts=open_counts((live.number for live in lives), front_count),
        handoff=handoff,
        disk=stats.disk,
        stages=engine.stage_lines(),
        graphs=engine.graph_line(),
        experts=engine.expert_line(),
        is_held=holding.is_on,
        held_at_s=holding.at_s,
    )


def _pools(layout: ModelLayout, stats: Stats) -> tuple[PoolUse, ...]:
    host, index = stats.host_page_count, stats.index_page_count
    host_used = host - stats.free_host_page_count
    index_used = index - stats.free_index_page_count
    return (
        PoolUse(HOST_PAGES, host_used, host, layout.host_page_bytes),
        PoolUse(INDEX_PAGES, index_used, index, layout.index_page_bytes),
    )


def _line(live: LiveRequest, now_s: float) -> RequestLine:
    request = live.request
    return RequestLine(
        live.number,
        request.state,
        len(request.prompt),
        request.prefilled_count,
        len(request.output),
        request.sampling.tokens_max,
        request.turn_count,
        request.hit_count,
        request.asked_count,
        live.name,
        now_s - live.began_s,
    )
