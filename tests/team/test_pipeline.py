"""Two stages of two ranks each: what an engine alone makes of the same prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from ess.clock import RealClock
from ess.comm.local import local_group
from ess.engine.config import EngineConfig
from ess.engine.step.runner import made_runner
from ess.engine.tokens.sampling import Sampling
from ess.kernels.backend import ops
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.weights.expected.split import HEAD_TENSORS
from ess.prefill.follower import Follower
from ess.prefill.lead import Lead
from ess.prefill.rooms import stage_offload
from ess.prefill.stage import Stage
from ess.prefill.team import Kind, TeamLead, TeamMember
from tests.prefill import pipes
from tests.prefill.pipes import DIGEST, Shelf, Sizes, engine_given, text

LENGTHS = (1, 2, 3, 65, 130, 300)
LAYERS = ((0, 2), (2, 4))
CONFIG = EngineConfig(max_running=8)
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def four_heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of which two ranks have as many as keep every bit."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    kept = (pipes.model_of, pipes.weights)
    monkeypatch.setattr(pipes, "CONFIG", {**pipes.CONFIG, **heads})
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


def model(layers: tuple[int, int], kind: Kind, rank: int) -> Model:
    tp = 2 if kind == "tp" else 1

    def tensor(name: str) -> torch.Tensor:
        whole = pipes.weights()[name]
        if not name.endswith(HEAD_TENSORS):
            return whole
        return torch.chunk(whole, tp)[rank % tp].contiguous()

    return build(read_config(pipes.CONFIG), tensor, layers=range(*layers), tp=tp)


def whole_layout():
    return read_config(pipes.CONFIG).layout(row="f32", index="f32")


def stage(layers: tuple[int, int], kind: Kind, team) -> Stage:
    whole = whole_layout()
    offload = stage_offload(
        whole,
        layers,
        host_bytes=64 * whole.host_page_bytes,
        index_bytes=64 * whole.index_page_bytes,
        length_max=1024,
        sequence_max=8,
        poison=True,
        shared=True,
    )
    runner = made_runner(model(layers, kind, 0), offload, CONFIG)
    ranks = TeamLead(runner, team, kind, RealClock())
    return Stage(runner, port=Shelf(), clock=RealClock(), ranks=ranks)


def member(kind: Kind, group) -> None:
    layers = LAYERS[group.rank // 2]
    made, layout = model(layers, kind, 1), whole_layout().part(*layers)
    TeamMember(made, ops(CONFIG.backend), layout, group, kind).run()


def follower(kind: Kind, group, shelves: dict[int, Shelf]) -> None:
    made = stage(LAYERS[1], kind, group.team)
    shelves[1] = made.port
    Follower(made, group, made.hello(DIGEST)).run()


@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_two_stages_of_two_ranks_make_what_an_engine_makes(kind: Kind):
    prompts = [text(length) for length in LENGTHS]
    groups, shelves = local_group(4, team=2, patience_s=PATIENCE_S), {}
    failed: list[BaseException] = []

    def run(act, group, *more) -> None:
        try:
            act(kind, group, *more)
        except BaseException as error:
            failed.append(error)
            group.fail(f"rank {group.rank}: {error!r}")

    listed = [(member, groups[1]), (follower, groups[2], shelves), (member, groups[3])]
    threads = [threading.Thread(target=run, args=each) for each in listed]
    for thread in threads:
        thread.start()
    first = stage(LAYERS[0], kind, groups[0].team)
    shelves[0] = first.port
    lead = Lead(
        first,
        groups[0],
        CONFIG,
        layers=LAYERS,
        sizer=Sizes(),
        clock=RealClock(),
        stage_timeout_s=PATIENCE_S,
    )
    lead.stages.gather(first.hello(DIGEST), PATIENCE_S, rest=first.ranks.rest)
    for uid, prompt in enumerate(prompts, 1):
        lead.add(prompt, Sampling(tokens_max=1), give=uid)
    while not (lead.is_idle and not len(lead._batches) and lead.stages.is_clear):
        lead.step()
    lead.check()
    lead.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed, failed
    for uid, alone in enumerate(engine_given(prompts), 1):
        parts = [shelves[at].given[uid] for at in (0, 1)]
        assert [each for part in parts for each in part.rows] == alone.rows
        assert [each for part in parts for each in part.keys] == alone.keys
        assert [each for part in parts for each in part.windows] == alone.windows
