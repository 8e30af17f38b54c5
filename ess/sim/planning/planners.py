"""A planner for a model on GPUs in nodes: measured operators, the link's rate, published misses."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ess.sim.locality import misses
from ess.sim.operators.families import family_of
from ess.sim.operators.gpus import silicon_of
from ess.sim.operators.silicon.chip import chip_of
from ess.sim.operators.silicon.stacks import SGLANG, Stack
from ess.sim.planning.ask import Ask
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner

MODEL: Final = "deepseek-v3.2"


def planner_of(
    ask: Ask,
    gpu: str,
    node: Node,
    *,
    model: str = MODEL,
    stack: Stack = SGLANG,
    package: Path | None = None,
) -> Planner:
    """The planner of `ess plan`, before ways to share the model are searched. `package` is an
    unpacked measurement package to read in place of the tables that ship."""
    family, machine = family_of(model), chip_of(gpu).machine
    limits = node.fetch_limits(machine, gpus=ask.gpu_count)
    link_name = min(limits, key=lambda name: limits[name])
    return Planner(
        operators=silicon_of(
            gpu, family=model, package=package, link_rate=limits[link_name], stack=stack
        ),
        curves=misses.published(layer_count=family.layout.layer_count),
        ask=ask,
        layout=family.layout,
        link_name=link_name,
    )
