"""What each single change of GPUs, nodes or drafts would make of a plan.

Every change is planned as the question itself was: with its own way to share the model, its own
resident side, its own prefill GPUs. A change that does not fit, or that was not measured, says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.silicon.chip import CHIPS, chip_of
from ess.sim.planning.answers import Question, over_all_gpus
from ess.sim.planning.ask import Ask
from ess.sim.planning.deployment import Comparison
from ess.sim.planning.node import Node, node_of
from ess.sim.planning.planner import Plan, Planner
from ess.sim.planning.prefilling import prefilling_of
from ess.sim.planning.ways import GROUPS, best_way

MTPS: Final = (1, 2, 4)
DDR4_SHARE: Final = 3200 / 4800
"""DDR4-3200 over DDR5-4800, with as many channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The parts of a question that a change may replace."""

    ask: Ask
    node: Node
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedPlan:
    """`plan` and `all_gpus` are None where the change was refused."""

    name: str
    plan: Plan | None = None
    all_gpus: Comparison | None = None
    refused: str | None = None


def changed(
    setup: Setup, question: Question, planner_of: Callable[[Setup], Planner]
) -> tuple[ChangedPlan, ...]:
    """The question as asked, then every change of it."""
    return tuple(
        _changed(name, other, question, planner_of)
        for name, other in [("as asked", setup), *changes(setup)]
    )


def changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    yield from _nodes(setup)
    ask = setup.ask
    for mtp in MTPS:
        if mtp != ask.queries_each and ask.accepted is None:
            yield f"--mtp {mtp}", replace(setup, ask=replace(ask, queries_each=mtp))
    for gpus in (ask.gpu_count // 2, 2 * ask.gpu_count):
        if gpus in GROUPS and ask.parallel is None:
            host = None if ask.host_bytes is None else ask.host_bytes * gpus // ask.gpu_count
            other = replace(ask, gpu_count=gpus, host_bytes=host)
            alike = "" if host is None else ", their memory alike"
            yield f"--gpus {gpus}{alike}", replace(setup, ask=other)
    for gpu in CHIPS:
        if gpu != setup.gpu and ask.device_bytes is None:
            yield from _on(gpu, setup)


def _on(gpu: str, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """The same question of another GPU, in the node that it comes in. Not if the nodes differ and
    the question gives figures of its node: nothing says which of them the other node would have."""
    ask, was, node = setup.ask, node_of(setup.gpu), node_of(gpu)
    if node == was:
        yield f"--gpu {gpu}", replace(setup, gpu=gpu)
    elif setup.node == was:
        is_whole = ask.host_bytes == was.host_bytes_of(ask.gpu_count)
        host = node.host_bytes_of(ask.gpu_count) if is_whole else ask.host_bytes
        other = replace(ask, host_bytes=host)
        yield f"--gpu {gpu}, in its node", Setup(ask=other, node=node, gpu=gpu)


def _nodes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    ask, node = setup.ask, setup.node
    if ask.host_bytes is not None:
        for name, host in (("half", ask.host_bytes // 2), ("twice", 2 * ask.host_bytes)):
            yield f"host memory: {name}", replace(setup, ask=replace(ask, host_bytes=host))
    link = node.link_rate or chip_of(setup.gpu).machine.link_rate
    has_pcie = node_of(setup.gpu) == Node()
    if has_pcie:
        ddr4 = replace(node, dram_rate=DDR4_SHARE * node.dram_rate)
        yield "host memory: DDR4", replace(setup, node=ddr4)
    for name, as_pcie, factor in (("half", 4, 0.5), ("twice", 6, 2.0)):
        same = f", as PCIe {as_pcie}" if has_pcie and node.link_rate is None else ""
        other = replace(node, link_rate=factor * link)
        yield f"host link: {name}{same}", replace(setup, node=other)


def _changed(
    name: str, setup: Setup, question: Question, planner_of: Callable[[Setup], Planner]
) -> ChangedPlan:
    asked = replace(question, node=setup.node)
    try:
        planner = planner_of(setup)
        if question.is_searched:
            planner = best_way(planner)
        plan = planner.plan()
        shared = over_all_gpus(planner, plan, asked, prefilling_of(planner))
    except BadInput as refusal:
        return ChangedPlan(name=name, refused=str(refusal))
    return ChangedPlan(name=name, plan=plan, all_gpus=shared)
