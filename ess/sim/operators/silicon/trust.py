"""How far a prediction of measured operators may be off, and where it has left the tables."""

from __future__ import annotations

import math
from typing import Final

from ess.sim.operators.families import Family
from ess.sim.operators.parallel import NODE_GPUS
from ess.sim.operators.silicon.attention import MEASURED_CONTEXT, MEASURED_TOKENS, QUERIES
from ess.sim.operators.silicon.chip import Chip
from ess.sim.operators.stages import Shape, Trust

BASE: Final = 0.15
"""Four of five public rows of the tables' own framework lie within their bands with it: `ess-bench
silicon`."""
MARK: Final = 0.04
NODES_MEASURED: Final = 8
RANKS_MEASURED: Final = 256
PREFIX_MEASURED: Final = 163_840


def trust_of(chip: Chip, family: Family, shape: Shape) -> Trust:
    marks = [*chip.marks, *_family_marks(family, shape), *_shape_marks(chip, shape)]
    width = BASE + chip.slack + MARK * (len(marks) - len(chip.marks))
    return Trust((-width, width), tuple(marks))


def _family_marks(family: Family, shape: Shape) -> list[str]:
    marks = []
    tokens = max(1.0, shape.query_count)
    if family.is_sparse and tokens * shape.context > MEASURED_TOKENS:
        marks.append(
            f"{tokens:,.0f} queries at {shape.context:,}: SGLang's sparse module was measured to "
            f"{MEASURED_TOKENS:,} tokens; beyond, keys cost what they cost in vLLM's"
        )
    if shape.parallel.sends and family.layout.hidden_dim != 7168:
        marks.append("experts and their exchange: DeepSeek's, by the width of a state")
    return marks


def _shape_marks(chip: Chip, shape: Shape) -> list[str]:
    parallel, marks = shape.parallel, []
    nodes = math.ceil(parallel.stage_gpus / NODE_GPUS)
    if shape.context > MEASURED_CONTEXT:
        marks.append(f"{shape.context:,} tokens: modules were measured to {MEASURED_CONTEXT:,}")
    if shape.query_count > QUERIES[-1]:
        marks.append(
            f"{shape.query_count:,.0f} queries: modules were measured to {QUERIES[-1]:.0f}"
        )
    if nodes > NODES_MEASURED:
        marks.append(f"exchange over {nodes} nodes: as over {NODES_MEASURED}, the most measured")
    if nodes > 1 and chip.base == "b200":
        marks.append("exchange between nodes of B200: an H200's")
    if parallel.expert_ep > RANKS_MEASURED:
        marks.append(f"experts over {parallel.expert_ep} GPUs: as over {RANKS_MEASURED}")
    if shape.prompt_prefix > PREFIX_MEASURED:
        marks.append(f"a prefix of {shape.prompt_prefix:,}: measured to {PREFIX_MEASURED:,}")
    if parallel.pp > 1:
        marks.append(f"{parallel.pp} stages: what a hop takes is nominal")
    return marks
