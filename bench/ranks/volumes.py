"""What ranks that divide heads, tokens or layers send one another, beside the formulas.

Bytes of tensors that leave all T ranks of a team together, per layer and token:

    heads, in steps     the values of a rank's heads go to all others: (T - 1) * heads * value
    heads, in prompts   a token's low-rank query goes to all others, and its selection, where the
                        layer makes one; values go to the rank that has the token:
                        (T - 1) * (query + selection + heads * value / T)
    tokens              nothing: rows and keys are written where all see them

After the layers the windows of a chunk go to all ranks that divide tokens; between two stages a
token's hidden state is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch

from ess.bench.engine.calibrate import texts
from ess.bench.harness.report import Row, compare
from ess.bench.ranks.counted import CountedGroup
from ess.bench.ranks.together import together
from ess.clock import RealClock
from ess.comm.group import Group
from ess.comm.local import local_group
from ess.door import Offload
from ess.door import Sequence as Opened
from ess.engine.chunking.partition import counted_costs, partition
from ess.engine.config import EngineConfig
from ess.engine.mesh.engines import Follower, Lead, MeshEngine
from ess.engine.prompt.pack import Span
from ess.engine.step.runner import made_runner
from ess.engine.tokens.sampling import Sampling
from ess.flashtrans.lanes import open_lane
from ess.flashtrans.patient import PatientLane
from ess.kernels.backend import ops
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.load import EMBEDDED, load_model
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.expected.split import Split
from ess.pool.warmup import WINDOW_MAX
from ess.prefill.team import Kind, TeamLead, TeamMember, heads_of
from ess.units import PAGE_ROWS, div_ceil

RANKS: Final = 2
PROMPT: Final = 96
OUTPUT: Final = 8
FLOAT: Final = 4
"""Bytes of a value, of a query and of a hidden state: they travel in float32."""
NUMBER: Final = 4
SLOT_PAGES: Final = 8


def volume_rows() -> list[Row]:
    config = embedded_config()
    layout = layout_of(config)
    heads, _ = mesh_bytes(tp=RANKS, pp=1)
    _, hidden = mesh_bytes(tp=1, pp=RANKS)
    position_count, layer_count = PROMPT - 1 + OUTPUT, config.layer_count
    values = config.head_count * config.value_dim * FLOAT
    by_heads, by_tokens = (chunk_bytes(kind) for kind in ("tp", "cp"))
    windows = min(WINDOW_MAX, PROMPT) * layout.group_count * layout.top_k * NUMBER
    made = layout.group_count / layout.layer_total * layout.top_k * NUMBER
    shared = config.query_rank * FLOAT + made + values / RANKS
    rows = [
        ("heads in steps", heads / position_count / layer_count, (RANKS - 1) * values),
        ("layers, to the next stage", hidden / position_count, config.hidden_dim * FLOAT),
        (
            "heads in prompts",
            by_heads / PROMPT / layout.layer_total,
            (RANKS - 1) * shared,
        ),
        ("tokens in prompts, a chunk's windows", by_tokens, (RANKS - 1) * windows),
    ]
    units = ("B/token/layer", "B/token", "B/token/layer", "B/chunk")
    return [
        compare(
            name=f"volume: {name}",
            unit=unit,
            ours=[ours],
            baseline=("formula", [formula]),
            config={"ranks": RANKS, "prompt": PROMPT, "tokens": OUTPUT},
        )
        for (name, ours, formula), unit in zip(rows, units, strict=True)
    ]


@functools.cache
def embedded_config() -> ModelConfig:
    with Checkpoint(EMBEDDED) as checkpoint:
        return checkpoint.model_config


def layout_of(config: ModelConfig) -> ModelLayout:
    return config.layout(name="ess-embedded")


def offload(layout: ModelLayout, *, shared: bool = False) -> Offload:
    length = PROMPT + OUTPUT + PAGE_ROWS
    return Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * SLOT_PAGES,
        host_bytes=div_ceil(length, PAGE_ROWS) * layout.host_page_bytes,
        length_max=length,
        shared=shared,
        lane=None if shared else PatientLane(open_lane()),
    )


def mesh_bytes(*, tp: int, pp: int) -> tuple[int, int]:
    """Bytes between the members of stages, and between stages, for a whole request through an
    engine of `tp` times `pp` processes."""

    def run(group: Group) -> tuple[int, int]:
        counted = CountedGroup(group)
        made = mesh_engine(counted, tp=tp, pp=pp)
        before = counted.team.sent_bytes
        if isinstance(made, Lead):
            made.add(texts(1, PROMPT)[0], Sampling(tokens_max=OUTPUT, ignore_eos=True))
            for _ in made.run():
                pass
            made.close()
        else:
            Follower(made).run()
        made.offload.close()
        return counted.team.sent_bytes - before, counted.next_bytes

    sums = zip(*together(local_group(tp * pp, team=tp), run), strict=True)
    inside, between = (sum(column) for column in sums)
    return inside, between


def mesh_engine(group: Group, *, tp: int, pp: int) -> MeshEngine:
    config = embedded_config().without_mtp()
    whole = layout_of(config)
    stage, member = divmod(group.rank, tp)
    part = partition(whole, pp, costs=counted_costs(config))[stage]
    heads = Split(tp=tp, tp_rank=member, by_heads=True) if tp > 1 else None
    model = load_model(layers=part, heads=heads)
    kind = MeshEngine if group.rank else Lead
    settings = EngineConfig(modes="none", budget_every=0)
    return kind(model, offload(whole.part(part.start, part.stop)), settings, group)


def chunk_bytes(kind: Kind) -> int:
    """Bytes of one chunk, whose ranks divide heads or tokens."""

    def run(group: Group) -> int:
        counted = CountedGroup(group)
        model = load_model(heads=heads_of(kind, group.team))
        if group.rank:
            TeamMember(model, ops("cpu"), layout_of(model.config), counted, kind).run()
            return counted.team.sent_bytes
        pools = offload(layout_of(model.config), shared=True)
        runner = made_runner(model, pools, EngineConfig(modes="none"))
        lead = TeamLead(runner, counted.team, kind, RealClock())
        [text] = texts(1, PROMPT + 1)
        with pools, torch.inference_mode():
            opened = pools.open(text, length_max=len(text))
            lead.queue_part([span(opened, text)]).made()
            lead.stop()
            opened.close()
        return counted.team.sent_bytes

    return sum(together(local_group(RANKS, team=RANKS), run))


def span(opened: Opened, text: Sequence[int]) -> Span:
    return Span(sequence=opened, start=0, tokens=text[:-1], following=text[1:])
