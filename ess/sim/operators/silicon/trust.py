"""How far a prediction may be off, and where it has left the measured tables."""

from __future__ import annotations

from typing import Final

from ess.sim.operators.families import Family
from ess.sim.operators.silicon.attention import MEASURED_CONTEXT, MEASURED_TOKENS, QUERIES
from ess.sim.operators.silicon.bank import SHARING_MODEL
from ess.sim.operators.silicon.chip import Chip
from ess.sim.operators.silicon.experts import MEASURED_HIDDEN, NEAR_MEASURED
from ess.sim.operators.silicon.stacks import SGLANG, own_names
from ess.sim.operators.stages import MicroBatch, Trust
from ess.units import counted

BASE: Final = 0.15
"""Wide enough that at least four of five public rows of the tables' own framework lie within their
bands: `ess-bench silicon` counts them."""
MARK: Final = 0.04
NODES_MEASURED: Final = 8
RANKS_MEASURED: Final = 256
PREFIX_MEASURED: Final = 163_840
GATHERED_MEASURED: Final = 16_384


def trust_of(chip: Chip, family: Family, shape: MicroBatch, *, stack: str = SGLANG) -> Trust:
    own = own_names(stack, chip.base)
    marks = [
        *chip.marks,
        *_stack_marks(stack, own, family, shape),
        *_family_marks(family, shape, has_module="sparse_decode" in own),
        *_shape_marks(chip, shape),
    ]
    width = BASE + chip.slack + MARK * (len(marks) - len(chip.marks))
    return Trust((-width, width), tuple(marks))


def _stack_marks(stack: str, own: frozenset[str], family: Family, shape: MicroBatch) -> list[str]:
    """Marks where SGLang's times replace those of another framework."""
    if stack == SGLANG:
        return []
    lent = [] if "products" in own else ["matrix products"]
    if shape.parallel.sends:
        lent.append("exchanges and experts behind them")
    if family.is_sparse and "sparse_decode" not in own:
        lent.append("sparse attention")
    elif family.table(shares=True) == SHARING_MODEL and not all(
        kind.has_indexer for kind in family.kinds
    ):
        lent.append("layers that share a selection")
    if family.is_sparse and shape.prompt_tokens:
        lent.append("sparse attention over prompts")
    return [f"{name} in {stack}: SGLang's times stand in" for name in lent]


def _family_marks(family: Family, shape: MicroBatch, *, has_module: bool) -> list[str]:
    """`has_module`: the stack has its own sparse modules, measured at any batch."""
    marks = []
    tokens = max(1.0, shape.query_count)
    if family.is_sparse and not has_module and tokens * shape.context > MEASURED_TOKENS:
        count = MEASURED_TOKENS // shape.context
        which = f" of more than {counted(count, 'query', 'queries')}" if count else ""
        marks.append(
            f"sparse attention{which} at {shape.context:,} tokens: SGLang's was "
            f"measured up to {MEASURED_TOKENS:,} for queries x context; from there its "
            "time grows as vLLM's does"
        )
    if shape.parallel.sends and family.layout.hidden_dim != MEASURED_HIDDEN:
        marks.append(
            f"experts of {family.name} and their exchange: DeepSeek's times stand in, scaled by "
            "the width of a token's state"
        )
    return marks


def _shape_marks(chip: Chip, shape: MicroBatch) -> list[str]:
    parallel, marks = shape.parallel, []
    nodes = chip.machine.groups_linked(parallel.stage_gpus)
    if shape.context > MEASURED_CONTEXT:
        marks.append(
            f"attention at {shape.context:,} tokens: measured up to {MEASURED_CONTEXT:,}, and "
            "carried on from there"
        )
    if shape.query_count > QUERIES[-1]:
        marks.append(
            f"attention of {shape.query_count:,.0f} queries at once: measured up to "
            f"{QUERIES[-1]:,.0f}, and carried on from there"
        )
    if nodes > NODES_MEASURED:
        marks.append(
            f"the exchange over {nodes} nodes: taken as over {NODES_MEASURED}, the most measured"
        )
    if nodes == 1 and parallel.stage_gpus > NEAR_MEASURED:
        marks.append(
            f"exchanges of more than {NEAR_MEASURED} GPUs on one NVLink: those of {NEAR_MEASURED} "
            "stand in, scaled by the bytes that leave a GPU"
        )
    if nodes > 1 and chip.base == "b200":
        where = "nodes of B200" if chip.machine.linked_gpus == NEAR_MEASURED else "racks of GB200"
        marks.append(f"the exchange between {where}: an H200's times stand in")
    if parallel.expert_ep > RANKS_MEASURED:
        marks.append(
            f"experts over {parallel.expert_ep} GPUs: taken as over {RANKS_MEASURED}, the most "
            "measured"
        )
    if not parallel.sends and shape.stage_tokens > GATHERED_MEASURED:
        marks.append(
            f"experts of more than {GATHERED_MEASURED:,} gathered tokens: carried on from there"
        )
    if shape.prompt_prefix > PREFIX_MEASURED:
        marks.append(
            f"prompts behind a prefix of {shape.prompt_prefix:,} tokens: measured up to "
            f"{PREFIX_MEASURED:,}, and carried on from there"
        )
    if parallel.pp > 1:
        marks.append(f"the hop between {parallel.pp} stages: its time is nominal")
    return marks
