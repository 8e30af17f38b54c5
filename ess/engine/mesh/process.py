"""A process of an engine whose model is divided: by layers among stages, by heads in a stage.

    python -m ess.engine.mesh.process ENDPOINT...     (a Launch as one JSON line on stdin)

Rank 0 speaks to the server at the ENDPOINTs; the others need none. Fail-stop: where one rank is
lost or wrong all end, and rank 0 tells the server why, which starts them again.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Final

import torch

from ess.clock import RealClock
from ess.comm.group import Group
from ess.door import Offload
from ess.door.handoff.port import Port
from ess.door.memory.common_host import CommonHost
from ess.engine.mesh.engines import Follower, Lead, MeshEngine
from ess.engine.process.arithmetic import arithmetic
from ess.engine.process.build import Built
from ess.engine.process.disk import disk_of
from ess.engine.process.lifeline import keep_objects, stay_with_lead
from ess.engine.process.member import join, main, membership, rank_of
from ess.engine.process.messages import Launch, Rank
from ess.engine.process.peers import open_port
from ess.engine.process.rank import greet, in_common
from ess.engine.process.wire import open_wire
from ess.engine.process.worker import serve
from ess.engine.step.runner import pack_weights
from ess.engine.tokens.determinism import check_heads
from ess.errors import BadInput
from ess.flashtrans.lanes import open_lane
from ess.flashtrans.patient import PatientLane
from ess.kernels.backend import ops
from ess.layout import ModelLayout
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer
from ess.models.weights.expected.split import Split
from ess.pool.capacity import even_chunks, whole_count
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import DiskTier

ALIKE: Final = (
    "max_running",
    "mtp",
    "mtp_auto",
    "tpot_ms",
    "chunk_tokens",
    "depth",
    "promise",
    "tbo",
    "deterministic",
    "role",
    "handoff_failure",
    "fake_prefill",
    "backend",
    "form",
    "row",
)
"""Settings by which a rank decides what is in a step, what it refuses, and for whom it waits."""


def facts(launch: Launch) -> dict[str, str]:
    """What must be the same on all ranks. With `deterministic` also what rounds: a stage on an
    unlike machine would make other rows than one engine, or a prefill worker, makes."""
    made = in_common(launch, ALIKE)
    made["max_model_len"] = str(launch.length_max)
    made["prefix_cache_dir"] = "given" if launch.config.prefix_cache_dir else "not given"
    made["layers"] = str(rank_of(launch).layers)
    if launch.config.deterministic:
        made["arithmetic"] = arithmetic(launch.config)
    return made


def load_part(launch: Launch, rank: Rank) -> tuple[Model, ModelLayout]:
    """This rank's part of the model, and the layout of the whole."""
    chosen = launch.config
    torch.set_num_threads(chosen.threads)
    stage, member = divmod(rank.rank, rank.team)
    heads = Split(tp=rank.team, tp_rank=member, by_heads=True) if rank.team > 1 else None
    model = load_model(
        launch.model, form=chosen.form, layers=range(*rank.layers[stage]), heads=heads
    )
    config = model.config
    if config.is_grouped:
        raise BadInput(
            f"tp_size is {rank.team}: {config.head_count} heads of a model of {config.family}"
            " cannot be shared equally"
        )
    check_heads(rank.team, head_count=config.head_count, deterministic=chosen.deterministic)
    return model, config.layout(row=chosen.row, has_mtp=chosen.mtp > 1)


def part_disk(
    launch: Launch, whole: ModelLayout, common: CommonHost
) -> DiskTier | Elsewhere | None:
    """The first member of a stage has the disk of its layers."""
    rank = rank_of(launch)
    layers = rank.layers[rank.rank // rank.team]
    if not launch.config.prefix_cache_dir or common.writes:
        return disk_of(launch, whole, layers)
    return Elsewhere(whole.part(*layers).host_page_bytes)


def part_offload(
    launch: Launch, part: ModelLayout, whole: ModelLayout, common: CommonHost
) -> Offload:
    """The share of these layers in the memory that is for all stages: as many pages as every other
    stage has, and for each group the slots that it has in one process."""
    chosen = launch.config
    host_pages = whole_count("host_bytes", launch.host_bytes, whole.host_page_bytes)
    index_pages = whole_count("index_bytes", launch.index_bytes, whole.index_page_bytes)
    chunks = even_chunks(whole, launch.slot_bytes // whole.chunk_bytes)
    mine = chunks[part.first_group : part.first_group + part.group_count]
    return Offload.create(
        part,
        slot_bytes=sum(mine) * whole.chunk_bytes,
        host_bytes=host_pages * part.host_page_bytes,
        index_bytes=index_pages * part.index_page_bytes,
        length_max=launch.length_max,
        sequence_max=chosen.max_running,
        query_max=chosen.query_max,
        evict=chosen.evict,
        lane=PatientLane(open_lane()),
        common=common,
        disk=part_disk(launch, whole, common),
    )


def made_engine(launch: Launch, group: Group) -> tuple[MeshEngine, Port | None]:
    """Makes the engine when all ranks have loaded the same model. Slots stay with their groups:
    budgets that follow each rank's own misses would let one rank admit what another cannot."""
    rank = rank_of(launch)
    model, whole = load_part(launch, rank)
    part = whole.part(*rank.layers[rank.rank // rank.team])
    common = CommonHost(group, whole, part, machines=launch.config.nnodes)
    offload = part_offload(launch, part, whole, common)
    if rank.team == 1:
        pack_weights(model, part, ops(launch.config.backend))
    if group.rank:
        stay_with_lead()
    greet(group, facts(launch))
    settings, tokenizer = replace(launch.config, budget_every=0), Tokenizer(launch.model)
    if group.rank:
        return MeshEngine(model, offload, settings, group, tokenizer=tokenizer), None
    port = lead_port(launch, offload, whole, common)
    return Lead(model, offload, settings, group, tokenizer=tokenizer, port=port), port


def lead_port(
    launch: Launch, offload: Offload, whole: ModelLayout, common: CommonHost
) -> Port | None:
    """The port for rows of all layers, which come from prefill workers."""
    if launch.config.role == "both":
        return None
    return open_port(launch, offload, RealClock(), whole=whole, ground=common.whole())


def lead(launch: Launch, group: Group, endpoints: list[str]) -> None:
    def built(*_: object) -> Built:
        engine, port = made_engine(launch, group)
        return Built(engine, port, engine.runner.model.config.vocab_size)

    with open_wire(endpoints) as (wire, context):
        serve(launch, wire, RealClock(), context, built)


def follow(launch: Launch, group: Group) -> None:
    engine, _ = made_engine(launch, group)
    keep_objects()
    Follower(engine).run()
    engine.offload.close()


def run(launch: Launch, endpoints: list[str]) -> None:
    group = join(rank_of(launch), launch.secret)
    with membership(group):
        if group.rank:
            follow(launch, group)
        else:
            lead(launch, group, endpoints)


if __name__ == "__main__":
    sys.exit(main(run, lambda launch: rank_of(launch).rank, sys.argv[1:]))
