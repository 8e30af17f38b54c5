"""Grouped-query attention in latent rows: against Llama's own form, compiled, and in the engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ess.bench.locality.guest_quality import QUERIES, Excerpt, quality_rows
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.kernels.backend import ops
from ess.models.indexer import index_scores, top_k
from ess.models.layers import linear, rms_norm, rotate
from ess.models.model import Model
from ess.models.plain import Plain
from ess.models.registry import read_config
from tests.model import grid
from tests.support.checkpoints import TINY_LLAMA, model, tensors, tokens
from tests.support.few import few
from tests.support.pairwise import pairwise

LENGTH, K = 96, TINY_LLAMA["index_topk"]
FACTORS = {name: grid.FACTORS[name] for name in ("mode", "tbo", "depth", "arena", "warm", "evict")}
CASES = [{"checkpoint": "llama", "mtp": "1", "sbo": "off", **case} for case in pairwise(FACTORS)]


def text(length: int = LENGTH) -> list[int]:
    return tokens(length, TINY_LLAMA["vocab_size"], seed=3)


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@functools.cache
def tiny(**changes: Any) -> Model:
    return model({**TINY_LLAMA, **changes})


class Spread:
    """Llama as it is written down: keys repeated for each head, a mask, no rows."""

    def __init__(self, made: Model) -> None:
        self.made, self.config = made, made.config
        self.weights = tensors(made.config)

    def run(self, ids: list[int]) -> Tensor:
        rotation = self.made.rotation(torch.arange(len(ids)))
        hidden = self.made.embed(torch.tensor(ids))
        for number, layer in enumerate(self.made.layers):
            hidden = layer.mlp(hidden + self._attended(number, hidden, rotation))
        return self.made.logits(self.made.finish(hidden))

    def _attended(self, number: int, hidden: Tensor, rotation: Any) -> Tensor:
        c, prefix = self.config, f"model.layers.{number}."
        normed = rms_norm(hidden, self.weights[f"{prefix}input_layernorm.weight"], c.norm_eps)
        q, k, v = (
            linear(normed, self.weights[f"{prefix}self_attn.{name}_proj.weight"]) for name in "qkv"
        )
        mask = self._mask(number, normed, q, rotation)
        sides = (
            rotate(x.view(len(x), -1, c.value_dim), rotation, "half").transpose(0, 1)
            for x in (q, k)
        )
        asked, keys = sides
        values = v.view(len(v), -1, c.value_dim).transpose(0, 1)
        each = c.head_count // c.key_head_count
        spread = (part.repeat_interleave(each, 0) for part in (keys, values))
        out = F.scaled_dot_product_attention(asked, *spread, attn_mask=mask)
        joined = out.transpose(0, 1).flatten(1)
        return linear(joined, self.weights[f"{prefix}self_attn.o_proj.weight"])

    def _mask(self, number: int, normed: Tensor, query: Tensor, rotation: Any) -> Tensor:
        indexer = self.made.layers[number].indexer
        assert indexer is not None
        probe = indexer.probe(normed, query, rotation)
        lengths = torch.arange(len(normed)) + 1
        scores = index_scores(probe.queries, probe.weights, probe.keys)
        chosen = top_k(scores, lengths, self.config.top_k)
        mask = torch.zeros(len(normed), len(normed) + 1, dtype=torch.bool)
        mask.scatter_(1, chosen.long().where(chosen >= 0, len(normed)), True)
        return mask[:, :-1]


@pytest.mark.parametrize("k", [K, 4 * LENGTH], ids=["selected", "dense"])
def test_rows_give_what_llama_gives(k: int) -> None:
    made = tiny(index_topk=k)
    assert far(Plain(made).run(text()).logits, Spread(made).run(text())) < 1e-4


def test_token_by_token() -> None:
    plain = Plain(tiny())
    pieces = [plain.run(text()[:40]).logits, *(plain.run([t]).logits for t in text()[40:])]
    assert far(torch.cat(pieces), Spread(tiny()).run(text())) < 1e-4


@pytest.mark.slow
def test_transformers_reads_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers", reason="extra `oracle` is not installed")
    config = transformers.LlamaConfig(**{k: v for k, v in TINY_LLAMA.items() if k != "model_type"})
    theirs = transformers.LlamaForCausalLM(config).eval()
    weights = {n: t for n, t in tensors(tiny().config).items() if ".indexer." not in n}
    left = theirs.load_state_dict(weights, strict=False)
    assert left.missing_keys in ([], ["lm_head.weight"])
    assert not left.unexpected_keys
    with torch.inference_mode():
        wanted = theirs(torch.tensor([text()])).logits[0]
    assert far(Plain(tiny(index_topk=4 * LENGTH)).run(text()).logits, wanted) < 1e-4


def test_a_row_is_keys_and_values_and_a_query_meets_its_own_group() -> None:
    made = tiny()
    c, layer = made.config, made.layers[0]
    rotation = made.rotation(torch.arange(5))
    asked, rows = layer.pre_attn(layer.enter(torch.randn(5, c.hidden_dim)), rotation)
    half, kept = c.latent_dim // 2, c.key_head_count * c.value_dim
    assert (c.row_dim, half, kept) == (2 * 128 + 32, 128, 96)
    assert not rows[:, kept:half].any()
    assert not rows[:, half + kept :].any()
    for head in range(c.head_count):
        own = head // 2 * c.value_dim
        assert asked[:, head, own : own + c.value_dim].all()
        assert asked[:, head].count_nonzero() == 5 * c.value_dim


@pytest.mark.parametrize("row", ["f32", "bf16", "fp8"])
def test_compiled_stages_do_what_the_facade_does(row: Any) -> None:
    made = tiny()
    c, layer, rotation = made.config, made.layers[1], made.rotation(torch.arange(5) + 9)
    hidden, layout = torch.randn(5, c.hidden_dim), c.layout(row=row, index="f32")
    compiled = layer.compiled(layout)
    assert layer.compiled(c.layout(row=row, index="f32")) is compiled
    front, entry = compiled.front(hidden, rotation), layer.enter(hidden)
    asked, rows = layer.pre_attn(entry, rotation)
    assert far(compiled.queries(front.query, rotation), asked) < 1e-5
    assert front.rows.shape == (5, layout.row_bytes)
    if row == "f32":
        assert far(front.rows.view(torch.float32), rows) < 1e-5
    attended = torch.randn(5, c.head_count, c.latent_dim)
    assert far(compiled.values(attended), layer.mla.values(attended)) == 0
    wanted = layer.mlp(layer.output(hidden, attended))
    assert far(compiled.back(hidden, attended), wanted) < 1e-5
    other = c.layout(row="fp8" if row == "f32" else "f32", index="f32")
    assert layer.compiled(other).front(hidden, rotation).rows.shape == (5, other.row_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", few(CASES[:8], all_of=CASES), ids=lambda case: "-".join(case.values())
)
def test_the_engine_says_what_the_plain_model_says(case) -> None:
    assert grid.differences(case) == []


@pytest.mark.parametrize("mode", ["resident", "da"])
def test_the_engine_without_compiled_stages(mode: str) -> None:
    eng = grid.engine({**CASES[0], "mode": mode, "arena": "tight", "depth": "0"})
    eng.runner.ops = ops("reference")
    request = eng.add(grid.text("llama")[:70], Sampling(tokens_max=3, ignore_eos=True))
    for _ in eng.run():
        eng.offload.check()
    eng.offload.close()
    assert request.output == grid.expected("llama", 0, 70)[:3]


def test_losses_are_those_of_the_model() -> None:
    """Dense and beyond top-k, on more tokens than are asked about at a time."""
    ids, first = text(2 * QUERIES + 40), QUERIES + 30
    rows = {row.name: row for row in quality_rows(tiny(), [Excerpt(ids, first)], [K])}
    for name, k in ("dense", 4 * len(ids)), (f"trained {K}", K):
        logits = Plain(tiny(index_topk=k)).run(ids[:-1]).logits[first:]
        wanted = float(F.cross_entropy(logits, torch.tensor(ids[first + 1 :])))
        assert rows[f"loss, {name}, f32 rows"].value == pytest.approx(wanted, abs=1e-5)
    assert rows[f"loss, oracle {K}, f32 rows"].value != rows["loss, dense, f32 rows"].value


WRONG = {
    "num_key_value_heads": 4,
    "num_attention_heads": "six",
    "head_dim": True,
    "num_hidden_layers": None,
    "hidden_act": "gelu",
    "attention_bias": True,
    "index_head_dim": 16,
    "pretraining_tp": 2,
}


@pytest.mark.parametrize("key", WRONG)
def test_what_is_no_such_model_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(BadInput, match=key):
        read_config({**TINY_LLAMA, key: WRONG[key]})


def test_heads_are_not_shared_by_ranks() -> None:
    from ess.models.registry import build

    config = read_config(TINY_LLAMA)
    with pytest.raises(BadInput, match="2 ranks cannot share the heads"):
        build(config, tensors(config).__getitem__, tp=2)
