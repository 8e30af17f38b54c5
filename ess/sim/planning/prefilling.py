"""The time of prefill and the tier that runs it, for planner and replay alike."""

from __future__ import annotations

from typing import Final

from ess.sim.operators.parallel import NODE_GPUS, Parallel
from ess.sim.planning.deployment import Prefilling, Work
from ess.sim.planning.node import Node
from ess.sim.planning.planner import MEMORY_SHARE, RESERVED_BYTES, Planner
from ess.sim.planning.weights import weight_bytes
from ess.sim.prefill import prefill_time
from ess.sim.prefill.prefill_time import FAR, FIRST_CHUNK, Handoff, Tier
from ess.sim.prefill.prompt_pass import PromptPass, pass_trust
from ess.units import PAGE_ROWS

GPUS_MAX: Final = 1 << 10


def prefilling_of(planner: Planner) -> Prefilling:
    """Prefill on the smallest group of whole nodes that holds the weights."""
    way = Parallel.wide(max(NODE_GPUS, least_gpus(planner)))
    farthest = PromptPass(parallel=way, tokens=FIRST_CHUNK, prefix=FAR, overlap=True)
    trust = pass_trust(planner.operators, farthest)
    return Prefilling(
        time=prefill_time.time_of(planner.operators, way),
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
