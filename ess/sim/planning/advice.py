"""What an operator must know beside the figures: when not to offload, and what a node must have."""

from __future__ import annotations

from dataclasses import replace

from ess.errors import BadInput
from ess.pool.capacity import HOST_PAGES
from ess.sim.planning.node import NORMAL_HOST_BYTES, Node
from ess.sim.planning.planner import Plan, Planner
from ess.units import format_bytes


def advice(planner: Planner, plan: Plan, node: Node) -> list[str]:
    """Sentences, the most important first; none when there is nothing to say."""
    return [
        *_resident_is_better(plan),
        *_host_memory(planner, plan, node),
    ]


def _resident_is_better(plan: Plan) -> list[str]:
    if plan.recommended == "offload" or plan.resident is None:
        return []
    assert plan.gain is not None
    return [
        f"run resident, batch {plan.resident.batch}: offload would give x{plan.gain:.2f} of its "
        "tokens per second, and take host memory"
    ]


def _host_memory(planner: Planner, plan: Plan, node: Node) -> list[str]:
    """Above what a normal node has: what is gained with that. Held back by it: what more gives."""
    gpus = planner.ask.gpu_count
    needed = plan.chosen.host_bytes * node.neighbours(gpus)
    normal = replace(node, host_bytes=NORMAL_HOST_BYTES)
    if needed > NORMAL_HOST_BYTES:
        has = f"a DGX H200 has {format_bytes(NORMAL_HOST_BYTES)}"
        return [f"{format_bytes(needed)} of host memory per node; {has}: {_with(planner, normal)}"]
    if plan.limiter != HOST_PAGES or planner.ask.host_bytes is None:
        return []
    ample = replace(planner, ask=replace(planner.ask, host_bytes=None))
    answer = ample.plan()
    if answer.chosen.batch <= plan.chosen.batch:
        return []
    amount = format_bytes(answer.chosen.host_bytes * node.neighbours(gpus))
    return [f"host memory limits the batch: {amount} per node would give {_outcome(answer)}"]


def _with(planner: Planner, node: Node) -> str:
    host_bytes = node.host_bytes * node.count(planner.ask.gpu_count)
    try:
        answer = replace(planner, ask=replace(planner.ask, host_bytes=host_bytes)).plan()
    except BadInput as refusal:
        return f"with that, {refusal}"
    return f"with that, {_outcome(answer)}"


def _outcome(answer: Plan) -> str:
    gain = "" if answer.gain is None else f", x{answer.gain:.2f} over resident"
    return f"batch {answer.chosen.batch}{gain}"
