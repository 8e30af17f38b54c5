"""Builds an engine process before it serves: the model, its offload, and the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ess import console
from ess.clock import Clock
from ess.comm.experts.expert_ranks import ExpertRanks
from ess.door import Offload
from ess.door.handoff.port import Port
from ess.engine.devices import is_device, ordinal_of
from ess.engine.engine import Engine
from ess.engine.process.disk import disk_of
from ess.engine.process.driven import Driven
from ess.engine.process.messages import Launch
from ess.engine.process.peers import Peers, open_port
from ess.engine.ranks.agreement import Ranks
from ess.models.load import load_model
from ess.models.text.tokenizer import Tokenizer
from ess.models.weights.ahead import build_ahead


@dataclass(frozen=True, slots=True)
class Built:
    engine: Driven
    port: Port | None
    vocabulary: int
    peers: Peers | None = None


def build(
    launch: Launch,
    clock: Clock,
    *,
    expert_ranks: ExpertRanks | None = None,
    ranks: Ranks | None = None,
    before_steps: Callable[[], None] = lambda: None,
) -> Built:
    """The engine over the loaded weights; of several `ranks`, which divide the experts, this one's
    share of them. `before_steps` is called when all is loaded and no step has run."""
    import torch

    chosen = launch.config
    torch.set_num_threads(chosen.threads)
    if is_device(chosen.device):
        torch.cuda.set_device(ordinal_of(chosen.device))
    model = load_model(
        launch.model, form=chosen.form, device=chosen.device, expert_ranks=expert_ranks
    )
    layout = model.config.layout(row=chosen.row, has_mtp=chosen.mtp > 1)
    offload = Offload.create(
        layout,
        slot_bytes=launch.slot_bytes,
        host_bytes=launch.host_bytes,
        index_bytes=launch.index_bytes,
        device=chosen.device,
        length_max=launch.length_max,
        sequence_max=chosen.max_running,
        query_max=chosen.query_max,
        shared=chosen.transport == "shared",
        evict=chosen.evict,
        disk=disk_of(launch, layout),
    )
    port = open_port(launch, offload, clock)
    tokenizer = Tokenizer(launch.model)
    engine = Engine(model, offload, chosen, tokenizer=tokenizer, port=port, ranks=ranks)
    tokens_max = max(chosen.chunk_tokens, chosen.query_max)
    build_ahead(model, count_max=tokens_max, clock=clock, tell=console.note)
    before_steps()
    engine.rehearse(console.note)
    return Built(engine, port, model.config.vocab_size)
