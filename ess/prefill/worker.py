"""A process of a pipelined prefill worker.

    python -m ess.prefill.worker ENDPOINT...     (a Launch as one JSON line on stdin)

Rank 0 is the first stage and leads: it speaks to the server as an engine's process does, at the
ENDPOINTs. The others get the same Launch with another rank, and need no endpoint.

Fail-stop: when a rank is lost, makes no progress or cannot obey, all ranks end, and rank 0 tells
the server why. A rank in the middle of a layer is ended `GRACE_S` later.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from ess import console
from ess.clock import Clock, RealClock
from ess.comm.group import Group
from ess.comm.link import Link, PeerLeft
from ess.comm.processes.staged import StagedGroup
from ess.comm.team import Team
from ess.door.handoff.port import Port
from ess.engine.chunking.sizer import ChunkSizer
from ess.engine.process.build import Built
from ess.engine.process.disk import disk_of
from ess.engine.process.lifeline import is_closed, keep_objects, stay_with_lead
from ess.engine.process.member import end_when, join, main, membership, rank_of
from ess.engine.process.messages import Launch, Rank
from ess.engine.process.peers import Peers, layout_digest, open_port
from ess.engine.process.wire import open_wire
from ess.engine.process.worker import serve
from ess.engine.step.runner import made_runner, pack_weights
from ess.engine.tokens.determinism import check_heads
from ess.errors import BadState, EssError
from ess.kernels.backend import ops
from ess.layout import ModelLayout
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.weights.ahead import build_ahead
from ess.prefill.follower import Follower
from ess.prefill.lead import Lead
from ess.prefill.reports import Hello
from ess.prefill.rooms import stage_offload
from ess.prefill.stage import Stage
from ess.prefill.stages import members
from ess.prefill.team import TeamLead, TeamMember, heads_of

GRACE_S: Final = 1.5
LOAD_S: Final = 3600.0
BY_HOST: Final = "two stages share a device, or one has no NCCL"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A stage over its weights, and its Hello."""

    stage: Stage
    hello: Hello
    port: Port | None
    whole: ModelLayout


def load_weights(launch: Launch, rank: Rank, team: Team) -> tuple[Model, ModelLayout]:
    """A member's part of the model, and the whole model's layout."""
    chosen = launch.config
    torch.set_num_threads(chosen.threads)
    model = load_model(
        launch.model,
        form=chosen.form,
        layers=range(*rank.layers[rank.rank // rank.team]),
        device=rank.device,
        heads=heads_of(rank.team_kind, team),
    )
    config = model.config
    if rank.team_kind == "tp":
        heads = config.head_count
        check_heads(team.size, head_count=heads, deterministic=chosen.deterministic)
    return model, config.layout(row=chosen.row, has_mtp=chosen.mtp > 1)


def load(launch: Launch, rank: Rank, team: Team, clock: Clock) -> Loaded:
    chosen, layers = launch.config, rank.layers[rank.rank // rank.team]
    model, whole = load_weights(launch, rank, team)
    offload = stage_offload(
        whole,
        layers,
        host_bytes=launch.host_bytes,
        index_bytes=launch.index_bytes,
        length_max=launch.length_max,
        sequence_max=chosen.max_running,
        shared=team.size > 1 or chosen.transport == "shared",
        device=rank.device,
        disk=disk_of(launch, whole, layers),
    )
    port = open_port(launch, offload, clock, whole=whole)
    runner = made_runner(model, offload, chosen)
    if team.size == 1:
        pack_weights(model, offload.layout, runner.ops, has_endings=False)
    ranks = TeamLead(runner, team, rank.team_kind, clock) if team.size > 1 else None
    stage = Stage(runner, port=port, clock=clock, ranks=ranks)
    build_ahead(model, count_max=chosen.chunk_tokens, clock=clock, tell=console.note)
    return Loaded(stage, stage.hello(layout_digest(launch, whole)), port, whole)


def led(launch: Launch, rank: Rank, group: Group, clock: Clock) -> Built:
    """The lead, once all stages have loaded and, with dynamic chunks, have been timed."""
    loaded = load(launch, rank, group.team, clock)
    sizer = ChunkSizer(
        launch.config.chunk_tokens,
        context=launch.length_max,
        dynamic=rank.dynamic,
        smoothing=rank.smoothing,
    )
    lead = Lead(
        loaded.stage,
        group,
        launch.config,
        layers=rank.layers,
        sizer=sizer,
        clock=clock,
        stage_timeout_s=rank.stage_timeout_s,
    )
    hellos = lead.stages.gather(loaded.hello, LOAD_S, rest=loaded.stage.ranks.rest)
    seconds = [(count, lead.measure(count)) for count in sizer.profile_sizes()]
    sizer.profiled((count, took) for count, took in seconds if took is not None)
    ends = members(hellos, loaded.whole.layer_total) if loaded.port is not None else ()
    peers = Peers(loaded.port, stages=ends, on_meet=lead.meet)
    return Built(lead, loaded.port, loaded.stage.runner.model.config.vocab_size, peers)


def lead(launch: Launch, group: Group, endpoints: list[str]) -> None:
    rank, clock = rank_of(launch), RealClock()
    with open_wire(endpoints) as (wire, context):
        serve(launch, wire, clock, context, lambda *_: led(launch, rank, group, clock))


def follow(launch: Launch, group: Group) -> None:
    loaded = load(launch, rank_of(launch), group.team, RealClock())
    stay_with_lead()
    follower = Follower(loaded.stage, group, loaded.hello)
    keep_objects()
    follower.run()
    if loaded.port is not None:
        loaded.port.close()
    loaded.stage.offload.close()


def assist(launch: Launch, group: Group) -> None:
    """Runs a member of a stage's team other than the first."""
    rank = rank_of(launch)
    model, whole = load_weights(launch, rank, group.team)
    layout = whole.part(*rank.layers[rank.rank // rank.team])
    stay_with_lead()
    member = TeamMember(model, ops(launch.config.backend), layout, group, rank.team_kind)
    keep_objects()
    member.run()


def is_over(link: Link | None, stdin: int | None) -> bool:
    """Whether the group has failed, as the link knows, or the parent has closed stdin."""
    if stdin is not None and is_closed(stdin):
        return True
    try:
        return link is not None and link.receive(0.0) is not None
    except (PeerLeft, BadState):  # the peer, or this rank, has left in order: it may take its time
        return False
    except EssError:
        return True


def run(launch: Launch, endpoints: list[str]) -> None:
    rank = rank_of(launch)
    group = join(rank, launch.secret)
    is_lead = rank.rank == 0
    if is_lead and isinstance(group, StagedGroup):
        console.note("ess: states go from stage to stage through the host's memory: " + BY_HOST)
    link = group.next if is_lead else group.reports[0]
    end_when(partial(is_over, link, None if is_lead else sys.stdin.fileno()), grace_s=GRACE_S)
    with membership(group):
        if is_lead:
            lead(launch, group, endpoints)
        elif group.team.rank:
            assist(launch, group)
        else:
            follow(launch, group)


if __name__ == "__main__":
    sys.exit(main(run, lambda launch: rank_of(launch).rank, sys.argv[1:]))
