"""Prompts through one rank, and through a team of threads with one copy of the pools."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ess.clock import RealClock
from ess.comm.group import Group
from ess.comm.local import local_group
from ess.door import Offload
from ess.door import Sequence as Opened
from ess.engine.config import EngineConfig
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import Prefilled, run_part
from ess.engine.step.runner import Runner, made_runner
from ess.kernels.backend import ops
from ess.models.config import ModelConfig
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.weights.expected.split import HEAD_TENSORS
from ess.prefill.team import Kind, TeamLead, TeamMember
from tests.support.checkpoints import GLM, SMALL, V32, tensors, tokens

PATIENCE_S = 60.0
LAYERS = 3


@functools.cache
def weights(family: str, heads: int) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    raw = {"v32": V32, "glm": GLM}[family]
    sizes = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    config = read_config({**raw, **SMALL, **sizes})
    return config, tensors(config)


@functools.cache
def model(family: str, *, heads: int = 4, tp: int = 1, rank: int = 0) -> Model:
    config, whole = weights(family, heads)

    def tensor(name: str) -> torch.Tensor:
        if not name.endswith(HEAD_TENSORS):
            return whole[name]
        return torch.chunk(whole[name], tp)[rank].contiguous()

    return build(config, tensor, tp=tp)


def offload(made: Model, form: str) -> Offload:
    layout = made.config.layout(row=form, index="f32" if form == "f32" else "fp8")
    return Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * 2,
        host_bytes=24 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=24,
        poison=True,
        shared=True,
    )


@dataclass
class Made:
    """What a prompt has left, as bytes: rows [layer], keys [group] of both pools, windows of each
    chunk, the last layer's states."""

    rows: list[torch.Tensor]
    keys: list[torch.Tensor]
    windows: list[torch.Tensor]
    states: list[torch.Tensor]


Run = Callable[[list[Span]], list[Prefilled]]
Chunk = tuple[int, int, int]


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [tokens(length, 512, seed=length) for length in lengths]


def packs(lengths: Sequence[int], chunk: int) -> list[list[Chunk]]:
    """(prompt, start, stop): every prompt's next chunk in each pack; the last token is left out."""
    made = []
    for start in range(0, max(lengths) - 1, chunk):
        made.append(
            [
                (at, start, min(start + chunk, length - 1))
                for at, length in enumerate(lengths)
                if start < length - 1
            ]
        )
    return made


def run_packs(
    pools: Offload, run: Run, texts: list[list[int]], listed: list[list[Chunk]]
) -> list[Made]:
    opened = [pools.open(text, length_max=len(text)) for text in texts]
    made = [Made([], [], [], []) for _ in texts]
    for chunks in listed:
        spans = [span(opened[at], texts[at], start, stop) for at, start, stop in chunks]
        for (at, *_), done in zip(chunks, run(spans), strict=True):
            made[at].windows.append(done.windows)
            made[at].states.append(done.hidden.clone())
    for mine, sequence, text in zip(made, opened, texts, strict=True):
        left_by(pools, sequence, len(text) - 1, mine)
        sequence.close()
    pools.check()
    return made


def span(sequence: Opened, text: list[int], start: int, stop: int) -> Span:
    return Span(
        sequence=sequence,
        start=start,
        tokens=text[start:stop],
        following=text[start + 1 : stop + 1],
    )


def left_by(pools: Offload, sequence: Opened, count: int, made: Made) -> None:
    held = pools.owner.pools
    host, active = sequence.host_rows(0, count).numpy(), sequence.active_rows(0, count).numpy()
    for layer in range(pools.layout.layer_total):
        assert held.latent.is_stored(layer, host).all()
        made.rows.append(torch.from_numpy(held.latent.rows[layer][host]))
    for group in range(pools.layout.key_layer_count):
        assert held.latent.is_keyed(group, host).all()
        made.keys.append(torch.from_numpy(held.latent.keys.read(group, host)))
        made.keys.append(torch.from_numpy(held.index.keys.read(group, active)))


@functools.cache
def alone(
    family: str, form: str, lengths: tuple[int, ...], chunk: int, *, heads: int = 4, **config: Any
) -> list[Made]:
    whole = model(family, heads=heads)
    pools = offload(whole, form)
    runner = made_runner(whole, pools, EngineConfig(modes="none", **config))
    with pools, torch.inference_mode():
        return run_packs(
            pools,
            lambda spans: run_part(runner, spans)[0],
            prompts(lengths),
            packs(lengths, chunk),
        )


def together(
    kind: Kind,
    size: int,
    family: str,
    form: str,
    lengths: Sequence[int],
    chunk: int,
    **config: Any,
) -> list[Made]:
    def lead(runner: Runner, group: Group) -> list[Made]:
        head = TeamLead(runner, group.team, kind, RealClock())
        with runner.offload, torch.inference_mode():
            made = run_packs(
                runner.offload,
                lambda spans: head.queue_part(spans).made(),
                prompts(lengths),
                packs(lengths, chunk),
            )
            head.rest()
            head.stop()
            return made

    return in_team(lead, kind, size, family, form, **config)


def in_team(
    lead: Callable[[Runner, Group], Any],
    kind: Kind,
    size: int,
    family: str,
    form: str,
    *,
    heads: int = 4,
    **config: Any,
) -> Any:
    """What `lead` returns on member 0; the others run in threads of their own."""
    groups = local_group(size, team=size, patience_s=PATIENCE_S)
    tp = size if kind == "tp" else 1
    settings = EngineConfig(modes="none", **config)
    failed: list[BaseException] = []

    def member(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            made = model(family, heads=heads, tp=tp, rank=rank % tp)
            TeamMember(made, ops(settings.backend), layout, groups[rank], kind).run()
        except BaseException as error:
            failed.append(error)
            groups[rank].fail(f"rank {rank}: {error!r}")

    first = model(family, heads=heads, tp=tp)
    pools = offload(first, form)
    layout = pools.layout
    runner = made_runner(first, pools, settings)
    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        return lead(runner, groups[0])
    except BaseException as error:
        groups[0].fail(f"rank 0: {error!r}")
        raise
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not failed, failed
