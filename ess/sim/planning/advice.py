"""Advice beside the figures: when not to offload, and what a node must have."""

from __future__ import annotations

from dataclasses import replace

from ess.errors import BadInput
from ess.pool.capacity import HOST_PAGES
from ess.sim.planning.node import NORMAL_HOST_BYTES, Node
from ess.sim.planning.planner import Plan, Planner
from ess.sim.planning.ways import best_way
from ess.units import format_bytes


def advice(planner: Planner, plan: Plan, node: Node, *, is_searched: bool) -> list[str]:
    """Sentences, the most important first; none if there is nothing to say. With other memory the
    best way to share the model is searched again, if it was searched before."""
    return [
        *_offload_or_not(planner, plan),
        *_host_memory(planner, plan, node, is_searched),
    ]


def _offload_or_not(planner: Planner, plan: Plan) -> list[str]:
    if not planner.is_sparse:
        return [f"{planner.operators.family.name} attends to every row: nothing can be offloaded"]
    if plan.resident is None or plan.gain is None:
        return []
    if plan.recommended == "offload":
        least = plan.gain * (1.0 + plan.gain_band[0])
        return [f"the gain is within the error: it may be x{least:.2f}"] if least < 1.0 else []
    return [
        f"run resident, batch {plan.resident.batch}: offload would give x{plan.gain:.2f} of its "
        "tokens per second, and take host memory"
    ]


def _host_memory(planner: Planner, plan: Plan, node: Node, is_searched: bool) -> list[str]:
    """For a plan with more memory than a normal node has: its gain within normal memory. For a plan
    at the limit of normal memory: the gain beyond."""
    gpus = planner.ask.gpu_count
    needed = plan.chosen.host_bytes * node.neighbours(gpus)
    if needed > NORMAL_HOST_BYTES:
        normal = replace(node, host_bytes=NORMAL_HOST_BYTES).host_bytes_of(gpus)
        try:
            said = _outcome(_planned_with(planner, normal, is_searched), beside=plan)
        except BadInput as refusal:
            said = str(refusal)
        has = f"a DGX H200 has {format_bytes(NORMAL_HOST_BYTES)}"
        return [f"{format_bytes(needed)} of host memory per node; {has}: with that, {said}"]
    if plan.limiter != HOST_PAGES or planner.ask.host_bytes is None:
        return []
    answer = _planned_with(planner, None, is_searched)
    if answer.chosen.batch <= plan.chosen.batch:
        return []
    amount = format_bytes(answer.chosen.host_bytes * node.neighbours(gpus))
    said = _outcome(answer, beside=plan)
    return [f"host memory limits the batch: {amount} per node would give {said}"]


def _planned_with(planner: Planner, host_bytes: int | None, is_searched: bool) -> Plan:
    other = replace(planner, ask=replace(planner.ask, host_bytes=host_bytes))
    return (best_way(other) if is_searched else other).plan()


def _outcome(answer: Plan, *, beside: Plan) -> str:
    gain = "" if answer.gain is None else f", x{answer.gain:.2f} over resident"
    same = answer.parallel == beside.parallel
    return f"batch {answer.chosen.batch}{gain}" + ("" if same else f" as {answer.parallel.name}")
