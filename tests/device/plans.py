"""What engines take of the device beside what is planned, in each form of weights and for chunks of
several sizes: run by `test_pretended_steps`.

Launches of our own kernels make what they need for themselves, and their kernels do not run; the
host's run in their place.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from ess.comm.experts.fixed import FixedExpertRanks
from ess.comm.experts.placement import even
from ess.comm.team import OneTeam
from ess.door.device.memory.uploads import Download
from ess.engine.engine import Engine, EngineConfig
from ess.engine.layer_bytes import BF16, F32
from ess.engine.ranks.agreement import Alone, Many
from ess.engine.step_bytes import decode_bytes, prompt_bytes
from ess.engine.tokens.sampling import Sampling
from ess.kernels import backend
from ess.kernels.cuda.triton import ops as launches
from ess.models.load import load_model
from tests.device.kernels import Kernels
from tests.device.memory import Peak
from tests.device.standin import opened
from tests.support import pretended
from tests.support.checkpoints import HY4, V32, tokens
from tests.unit.weights.conftest import write_checkpoint

VOCABULARY, LENGTH, PROMPTS, MTP = 12_288, 256, (246, 100), 2
RAW = {
    **V32,
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "qk_rope_head_dim": 32,
    "index_n_heads": 8,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
WIDE = {"num_experts_per_tok": 8, "moe_intermediate_size": 512}
"""With these the experts' lines take the most, else values of heads do."""
FEW_WORDS = {"vocab_size": 512}
"""With these no logits take the most."""
DRAWN = Sampling(
    temperature=0.7,
    top_k=20,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.5,
    logprobs=1,
    tokens_max=9,
    ignore_eos=True,
)
MULTIPROCESSORS = 132
MOST = 1.05
"""The plan may have this much more than is taken."""


class Launched(Kernels):
    def __getattr__(self, name):
        computed, launched = super().__getattr__(name), getattr(launches, name)

        def both(*given):
            launched(*given)
            return computed(*given)

        return both


@pytest.fixture(autouse=True)
def launched(alone, monkeypatch):
    monkeypatch.setattr(pretended, "RUN", lambda *args, **kwargs: None)
    monkeypatch.setattr(backend, "_cuda", Launched)
    backend._ops.cache_clear()


class Mirror(OneTeam):
    """A rank of two; the other does the same."""

    size = 2

    def all_gather(self, tensor, dim=0, *, sizes=None):
        return torch.cat((tensor, tensor), dim)

    def start(self, content, given, due):
        return Mirrored(content, content.clone())

    def spread(self, content):
        return Mirrored(content, content.repeat(2))


class Mirrored:
    """Keeps both sides' memory, as `WiredParts` does."""

    def __init__(self, content, came):
        self._content, self._came = content, came

    def wait(self):
        return self._came


@contextlib.contextmanager
def engine(folder, form, chunk_tokens, *, placement=None, mtp=MTP):
    expert_ranks, ranks = None, Alone()
    if placement is not None:
        home = torch.device("cuda", 0)
        expert_ranks = FixedExpertRanks(
            Mirror(), placement, home, lambda there: Download(there).read
        )
        ranks = Many(expert_ranks, on_meet=lambda: None)
    model = load_model(folder, form=form, device="cuda", expert_ranks=expert_ranks)
    layout = model.config.layout()
    offload = opened(
        layout,
        device="cuda:0",
        slot_bytes=24 * layout.chunk_bytes * layout.group_count,
        host_bytes=20 * layout.host_page_bytes,
        length_max=LENGTH,
        slot_floor=64,
        sequence_max=len(PROMPTS),
        query_max=MTP * len(PROMPTS),
        poison=True,
    )
    chosen = EngineConfig(
        modes="da", mtp=mtp, depth=1, chunk_tokens=chunk_tokens, backend="cuda", graphs=0
    )
    yield Engine(model, offload, chosen, ranks=ranks)
    offload.close()


def taken_by(eng):
    """The most bytes of steps with chunks of prompts, and of those without."""
    vocabulary, taken = eng.runner.model.config.vocab_size, {"prompts": 0, "steps": 0}
    with Peak() as peak:
        for count in PROMPTS:
            eng.add(tokens(count, vocabulary, seed=count), DRAWN)
        while not eng.is_idle:
            peak.begin()
            made = eng.step()
            if not (made.chunks and made.turn_count):
                part = "prompts" if made.chunks else "steps"
                taken[part] = max(taken[part], peak.most)
    return taken


@pytest.mark.parametrize(
    ("form", "chunk_tokens"),
    [
        ("bf16", 128),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("f32", 246), ("f32", 64), ("stored", 128))
        ),
    ],
)
def test_a_plan_is_near_to_what_is_taken_and_not_below(form, chunk_tokens, tmp_path):
    write_checkpoint(tmp_path, {**RAW, **FP8, **WIDE} if form == "stored" else RAW)
    sizes = {"length_max": LENGTH, "value_bytes": F32 if form == "f32" else BF16}
    with engine(tmp_path, form, chunk_tokens) as eng:
        config, layout, taken = eng.runner.model.config, eng.offload.layout, taken_by(eng)
    prompts = prompt_bytes(config, layout, chunk_tokens=chunk_tokens, prompt_max=2, **sizes)
    with mock.patch("ess.engine.step_bytes.PROGRAMS_MAX", MULTIPROCESSORS):
        steps = decode_bytes(config, query_max=len(PROMPTS) * MTP, **sizes)
    assert taken["prompts"] <= prompts <= MOST * taken["prompts"]
    assert taken["steps"] <= steps <= MOST * taken["steps"]


def test_a_plan_of_ranks_is_near_to_what_is_taken_and_not_below(tmp_path):
    """A chunk is cut in two; what came for the first part is gone when the second one has its own.
    A plan of steps also has partials of half a batch, beside the other half's exchange."""
    write_checkpoint(tmp_path, {**RAW, **WIDE, **FEW_WORDS})
    sizes = {"length_max": LENGTH, "rank_count": 2}
    with engine(tmp_path, "bf16", 246, placement=even(RAW["n_routed_experts"], 2)) as eng:
        config, layout, taken = eng.runner.model.config, eng.offload.layout, taken_by(eng)
    prompts = prompt_bytes(config, layout, chunk_tokens=246, prompt_max=2, **sizes)
    with mock.patch("ess.engine.step_bytes._partial_bytes", return_value=0):
        steps = decode_bytes(config, query_max=len(PROMPTS) * MTP, **sizes)
    assert taken["prompts"] <= prompts <= MOST * taken["prompts"]
    assert taken["steps"] <= steps <= MOST * taken["steps"]


GATED = {key: value for key, value in RAW.items() if V32.get(key) != value} | {"v_head_dim": 256}


def test_a_plan_has_the_gates_of_values(tmp_path):
    """Values of these heads take the most; gates make them float32."""
    write_checkpoint(tmp_path, {**HY4, **GATED})
    sizes = {"length_max": LENGTH, "value_bytes": BF16}
    with engine(tmp_path, "bf16", 128, mtp=1) as eng:
        config, layout, taken = eng.runner.model.config, eng.offload.layout, taken_by(eng)
    prompts = prompt_bytes(config, layout, chunk_tokens=128, prompt_max=2, **sizes)
    assert taken["prompts"] <= prompts <= MOST * taken["prompts"]
