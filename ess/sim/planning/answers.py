"""The whole answer to an operator: a plan, its figures over all GPUs, and the fewest GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from ess.sim.planning.advice import advice
from ess.sim.planning.deployment import Comparison, Deployment, Prefilling, Work, compared
from ess.sim.planning.fleet import FleetGoal
from ess.sim.planning.fleets import Fleets, fleets
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Plan, Planner
from ess.sim.planning.prefilling import prefilling_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The part of the question besides the planner's ask: the node, what a request is, the price of
    a GPU hour, the rate of requests and their time to the first token; and whether the way to share
    the model was searched."""

    node: Node
    work: Work
    price: float | None = None
    wanted: FleetGoal | None = None
    is_searched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """`marks` name what was not measured for this question."""

    plan: Plan
    all_gpus: Comparison
    fleets: Fleets | None
    advice: tuple[str, ...]
    marks: tuple[str, ...]


def answered(planner: Planner, question: Question) -> PlanAnswer:
    prefilling = prefilling_of(planner)
    plan = planner.plan()
    smallest = None
    if question.wanted is not None:
        smallest = fleets(
            planner,
            prefilling=prefilling,
            node=question.node,
            work=question.work,
            wanted=question.wanted,
        )
    sides = (smallest.offload, smallest.resident) if smallest else ()
    fleet_marks = [mark for side in sides if side is not None for mark in side.marks]
    return PlanAnswer(
        plan=plan,
        all_gpus=over_all_gpus(planner, plan, question, prefilling),
        fleets=smallest,
        advice=tuple(advice(planner, plan, question.node, is_searched=question.is_searched)),
        marks=tuple(dict.fromkeys([*plan.marks, *prefilling.marks, *fleet_marks])),
    )


def over_all_gpus(
    planner: Planner, plan: Plan, question: Question, prefilling: Prefilling
) -> Comparison:
    deployment = Deployment(
        work=question.work,
        prefilling=prefilling,
        layout=planner.layout,
        node=question.node,
        gpu_count=planner.ask.gpu_count,
        price=question.price,
        accepted_band=planner.ask.accepted_band,
    )
    return compared(deployment, plan.chosen, plan.resident)
