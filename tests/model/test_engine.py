"""The engine gives the tokens of the plain model: whatever the mode, the arena, the neighbours."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.sampling import Sampling
from ess.flashtrans import ManualLane
from ess.models.plain import greedy
from tests.support.checkpoints import GLM, V32, model, tokens

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "index_topk": 24,
    "index_n_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES = {"v32": V32, "glm": GLM}


@functools.cache
def small(family: str):
    torch.set_num_threads(1)
    return model({**FAMILIES[family], **SMALL})


@functools.cache
def expected(family: str, length: int, count: int) -> list[int]:
    return greedy(small(family), prompt(length), count)


def prompt(length: int) -> list[int]:
    return tokens(length, 512, seed=length)


def engine(family: str, *, mtp: int = 1, chunks: int = 2, **config) -> Engine:
    made = small(family)
    kept = made.config if mtp > 1 else msgspec.structs.replace(made.config, mtp_layer_count=0)
    layout = kept.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.group_layers_max * layout.page_bytes * chunks,
        host_bytes=60 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=24,
        lane=ManualLane(seed=chunks, delay_max=3),
        poison=True,
    )
    return Engine(made, offload, EngineConfig(mtp=mtp, chunk_tokens=48, **config))


def run(eng: Engine) -> None:
    for _ in eng.run():
        eng.offload.check()
    eng.offload.drain()
    assert eng.offload.stats().used_slot_count.sum() == 0


@pytest.mark.parametrize("family", ["v32", "glm"])
@pytest.mark.parametrize("mode", ["resident", "none", "da", "dba"])
@pytest.mark.parametrize("mtp", [1, 3])
def test_every_mode_gives_the_plain_model_s_tokens(family, mode, mtp):
    eng = engine(family, mtp=mtp, modes=mode, chunks=1)
    made = [eng.add(prompt(length), Sampling(tokens_max=10)) for length in (1, 2, 90, 130)]
    run(eng)
    for request in made:
        assert request.output == expected(family, len(request.prompt), 10), len(request.prompt)
        assert request.reason == "length"


def test_requests_join_leave_preempt_and_share_prefixes():
    eng = engine("v32", mtp=2, modes="da")
    first = eng.add(prompt(200), Sampling(tokens_max=16))
    for _ in range(7):
        eng.step()
    assert first.state == "decoding"
    second = eng.add(prompt(90), Sampling(tokens_max=12))
    eng.step()
    eng.preempt(first)
    third = eng.add(prompt(200), Sampling(tokens_max=8))
    gone = eng.add(prompt(70), Sampling(tokens_max=50))
    for _ in range(6):
        eng.step()
    assert third.prefilled_count > 0
    eng.cancel(gone)
    eng.resume(first)
    run(eng)
    assert first.output == expected("v32", 200, 16)
    assert second.output == expected("v32", 90, 12)
    assert third.output == expected("v32", 200, 8)
    assert gone.reason == "cancelled"
    again = eng.add(prompt(200), Sampling(tokens_max=4))
    eng.step()
    assert again.sequence is not None
    assert again.sequence.cached_count >= 64, "the prompt of a finished request is a prefix"
    run(eng)
    assert again.output == expected("v32", 200, 4)
