"""The time of prefill and the tier that runs it, for planner and replay alike."""

from __future__ import annotations

from typing import Final

from ess.sim.operators.parallel import Parallel
from ess.sim.planning.deployment import Prefilling, Work
from ess.sim.planning.node import Node
from ess.sim.planning.planner import MEMORY_SHARE, RESERVED_BYTES, Planner
from ess.sim.planning.weights import weight_bytes
from ess.sim.prefill import prefill_time
from ess.sim.prefill.prefill_time import FAR, FIRST_CHUNK, Handoff, Tier
from ess.sim.prefill.prompt_pass import PromptPass, pass_trust
from ess.units import PAGE_ROWS

GPUS_MAX: Final = 1 << 10
GROUPS: Final = (8, 16, 32)
"""Groups that prefill together in public measurements."""
CLEARLY: Final = 1.05


def prefilling_of(planner: Planner) -> Prefilling:
    """Prefill on the smallest group that is possible, unless a larger one is clearly faster for
    each of its GPUs: more than 8 send tokens to their experts instead of gathering all tokens on
    all GPUs."""
    least = least_group(planner)
    tried = [prefilling_in(planner, gpus) for gpus in dict.fromkeys([least, *GROUPS])]
    tried = [each for each in tried if each.group_gpus >= least]
    soonest_s = min(each.time.of(FAR) for each in tried)
    return next(each for each in tried if each.time.of(FAR) < CLEARLY * soonest_s)


def least_group(planner: Planner) -> int:
    """The GPUs of the smallest group that holds the weights."""
    return max(GROUPS[0], least_gpus(planner))


def prefilling_in(planner: Planner, gpus: int) -> Prefilling:
    """Prefill in a group of this many GPUs."""
    way = Parallel.wide(gpus)
    farthest = PromptPass(parallel=way, tokens=FIRST_CHUNK, prefix=FAR, overlap=True)
    trust = pass_trust(planner.operators, farthest)
    return Prefilling(
        time=prefill_time.time_of(planner.operators, way),
        group_gpus=gpus,
        band=trust.band,
        marks=trust.marks,
    )


def tier_of(planner: Planner, prefilling: Prefilling, node: Node, size: tuple[int, int]) -> Tier:
    """The tier; `size` is pipelines x GPUs of each."""
    layout = planner.layout
    pipelines, stages = size
    return Tier(
        pipelines=pipelines,
        stages=stages,
        time=prefilling.time,
        handoff=Handoff(
            token_bytes=layout.host_page_bytes // PAGE_ROWS,
            index_page_bytes=planner.budget.index_page_bytes,
            link_rate=planner.operators.machine.link_rate,
            nic_rate=node.nic_rate / node.neighbours(planner.ask.gpu_count),
        ),
        layer_count=layout.layer_count,
    )


def through(
    planner: Planner, prefilling: Prefilling, node: Node, work: Work, stages: int
) -> tuple[float, float]:
    """How long a request occupies a pipeline of `stages` GPUs, and how long until it may decode."""
    tier = tier_of(planner, prefilling, node, (1, stages))
    return tier.seconds(work.prompt_tokens, cached=work.cached_tokens)


def least_gpus(planner: Planner) -> int:
    """The fewest GPUs that hold the weights, shared as widely as possible."""
    room = MEMORY_SHARE * planner.operators.machine.memory_bytes - RESERVED_BYTES
    count = 1
    while weight_bytes(planner.operators.family, Parallel.wide(count)) > room and count < GPUS_MAX:
        count *= 2
    return count
