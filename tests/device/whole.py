"""Whole steps by the kernels of a device, all of them interpreted: run by `test_forward_steps`.

No size is a multiple of a block. The device has so few multiprocessors that programs share out
lists and cut them. Prompts run on it too: one ends within a page, one has a single token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest
import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cuda.triton import launch
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.weights.blocks import dequantise, quantise
from ess.models.weights.kept import Fp8Weight
from tests.device.engines import shuffle
from tests.model.test_lowprec import KL_MAX, mean_kl
from tests.support.checkpoints import GLM, V32, tensors, tokens

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 67,
    "hidden_size": 40,
    "intermediate_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 36,
    "qk_rope_head_dim": 12,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "index_head_dim": 20,
    "index_n_heads": 9,
    "index_topk": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
CODED: Final = {"kv_lora_rank": 128, "index_head_dim": 32}
FAMILIES: Final = {"v32": V32 | SIZES, "glm": GLM | SIZES}
PROMPTS: Final = (19, 1)
SM_COUNT: Final = 5
IN_BLOCKS: Final = ("q_b_proj", "o_proj", "wq_b", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(launch, "_sm_count", lambda device: SM_COUNT)


def weights(raw: Mapping[str, Any], device: str) -> Model:
    parsed = read_config(raw)
    made = tensors(parsed)
    return build(parsed, lambda name: made[name].to(device))


def blocks(raw: Mapping[str, Any], device: str) -> Model:
    """Of matrices in blocks of fp8; the host has what these stand for, in bfloat16."""
    parsed = read_config(raw)
    made = tensors(parsed)

    def weight(name):
        if not any(part in name for part in IN_BLOCKS):
            return made[name].to(device)
        held = Fp8Weight(*quantise(made[name]))
        if device == "cpu":
            return dequantise(held.values, held.scales, dtype=torch.float32)
        return held.to(torch.device(device))

    return build(parsed, weight)


def engine(made: Model, *, form: str, mode: str) -> Engine:
    layout = made.config.layout(row=form, index=form)
    offload = Offload.create(
        layout,
        device="cpu" if made.device.type == "cpu" else "cuda:0",
        slot_bytes=layout.group_count * layout.chunk_bytes * 3,
        host_bytes=12 * layout.host_page_bytes,
        length_max=256,
        slot_floor=16,
        poison=True,
    )
    shuffle(offload)
    chosen = EngineConfig(modes=mode, mtp=2, backend=made.device.type, graphs=0)
    return Engine(made, offload, chosen)


def said(eng: Engine) -> tuple[torch.Tensor, list[list[int]]]:
    """The logits of every query of every step, and the tokens. Queries of the first step come
    first, one of each request."""
    made, decode = [], eng.runner.decode

    def kept(batch, ids):
        forward = decode(batch, ids)
        made.append(forward.logits.cpu())
        return forward

    eng.runner.decode = kept
    sampling = Sampling(tokens_max=2, ignore_eos=True)
    requests = [eng.add(tokens(count, 67, seed=count), sampling) for count in PROMPTS]
    while not eng.is_idle:
        eng.step()
    eng.check()
    eng.offload.close()
    return torch.cat(made), [request.output for request in requests]


@pytest.mark.parametrize(
    ("family", "mode"),
    [("v32", "none"), pytest.param("glm", "da", marks=pytest.mark.long)],
)
def test_values_are_those_of_the_host(family: str, mode: str) -> None:
    raw = FAMILIES[family]
    want, told = said(engine(weights(raw, "cpu"), form="f32", mode="none"))
    ours, spoken = said(engine(weights(raw, "cuda"), form="f32", mode=mode))
    assert spoken == told
    torch.testing.assert_close(ours, want, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(("family", "mode"), [("v32", "da"), ("glm", "dba")])
def test_fp8_is_near_that_of_the_host(family: str, mode: str) -> None:
    """Rows, keys and weights. Random weights have no margins: what is bounded is the damage."""
    raw, first = FAMILIES[family] | CODED, slice(len(PROMPTS))
    want, told = said(engine(blocks(raw, "cpu"), form="fp8", mode="none"))
    ours, spoken = said(engine(blocks(raw, "cuda"), form="fp8", mode=mode))
    assert [len(ids) for ids in spoken] == [len(ids) for ids in told]
    assert 0 < mean_kl(want[first], ours[first]) < KL_MAX
