"""Both families against frozen answers of transformers 5.23 (tests/golden/make_families.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.models.plain import Plain
from ess.models.registry import build, read_config
from tests.support import checkpoints
from tests.support.greedy import greedy
from tests.support.unabsorbed import Unabsorbed
from tests.support.walk import walk

GOLDEN = Path(__file__).parents[1] / "golden" / "families.npz"
PREFILL, SAMPLED, TOLERANCE = 72, 8, 1e-4
RAWS = {"deepseek_v32": checkpoints.TINY_V32, "glm_moe_dsa": checkpoints.TINY_GLM}


class Case:
    def __init__(self, family: str) -> None:
        with np.load(GOLDEN) as file:
            self._found = {
                name.removeprefix(family + "."): file[name]
                for name in file.files
                if name.startswith(family)
            }
        self.raw: dict[str, Any] = RAWS[family]
        self.tokens: list[int] = self._found["tokens"].tolist()
        self.model = checkpoints.model(self.raw, latent_norm_eps=1e-6)

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._found[name])


@pytest.fixture(scope="module", params=sorted(RAWS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def test_prefill_in_one_go(case: Case) -> None:
    outcome = Plain(case.model).run(case.tokens)
    assert far(outcome.logits, case["logits"]) < TOLERANCE


def test_cached_decode_one_token_at_a_time(case: Case) -> None:
    plain = Plain(case.model)
    plain.run(case.tokens[:PREFILL])
    logits = torch.cat([plain.run([token]).logits for token in case.tokens[PREFILL:]])
    assert far(logits, case["logits_cached"]) < TOLERANCE


def test_several_tokens_at_once_after_forgetting_wrong_ones(case: Case) -> None:
    plain = Plain(case.model)
    plain.run(case.tokens[:PREFILL])
    plain.run([5, 6, 7])
    plain.keep(PREFILL)
    logits = torch.cat(
        [plain.run(case.tokens[n : n + 4]).logits for n in range(PREFILL, len(case.tokens), 4)]
    )
    assert far(logits, case["logits_cached"]) < TOLERANCE


def test_greedy_tokens_are_the_golden_ones(case: Case) -> None:
    assert greedy(case.model, case.tokens, len(case["greedy"])) == case["greedy"].tolist()


def test_latents_rope_keys_and_index_keys(case: Case) -> None:
    plain = Plain(case.model)
    plain.run(case.tokens)
    rows = torch.stack([layer.rows.filled[::SAMPLED] for layer in plain.layers])
    keys = torch.stack(
        [layer.keys.filled[::SAMPLED] for layer in plain.layers if layer.keys.length]
    )
    assert far(rows, case["rows"]) < TOLERANCE
    assert far(keys, case["keys"]) < TOLERANCE


def test_selections_are_the_golden_ones(case: Case) -> None:
    top_k = case.model.config.top_k
    outcome = Plain(case.model).run(case.tokens)
    assert len(outcome.selections) == len(case["selections"])
    for ours, theirs in zip(outcome.selections, case["selections"], strict=True):
        assert ours is not None
        assert torch.equal(ours[top_k:], theirs[top_k:].int())


def test_top_k_beyond_the_length_is_dense(case: Case) -> None:
    model = checkpoints.model({**case.raw, "index_topk": 128}, latent_norm_eps=1e-6)
    outcome = Plain(model).run(case.tokens)
    assert all(selection is None for selection in outcome.selections)
    assert far(outcome.logits, case["logits_dense"]) < TOLERANCE
    assert far(outcome.hidden, walk(model, case.tokens).hidden) < TOLERANCE


def test_the_wrong_rope_in_the_indexer_is_seen(case: Case) -> None:
    wrong = not case.model.config.index_rope_interleaved
    model = checkpoints.model(case.raw, latent_norm_eps=1e-6, index_rope_interleaved=wrong)
    outcome = Plain(model).run(case.tokens)
    top_k = model.config.top_k
    assert far(outcome.logits[:top_k], case["logits"][:top_k]) < TOLERANCE
    assert far(outcome.logits[top_k:], case["logits"][top_k:]) > 0.1


def test_stages_by_hand_equal_the_plain_runner(case: Case) -> None:
    by_hand = walk(case.model, case.tokens)
    assert far(by_hand.hidden, Plain(case.model).run(case.tokens).hidden) < 1e-5


@pytest.mark.parametrize("latent_eps", [None, 0.3])
def test_against_float64_with_an_eps_of_its_own(case: Case, latent_eps: float | None) -> None:
    model = checkpoints.model(case.raw, latent_norm_eps=latent_eps)
    weights = checkpoints.tensors(model.config)
    reference = Unabsorbed(case.raw, weights, latent_eps=latent_eps)
    hidden = Plain(model).run(case.tokens).hidden
    assert far(hidden.double(), reference.hidden(case.tokens)) < TOLERANCE


def test_a_weight_of_the_wrong_shape_or_kind_is_named() -> None:
    config = read_config(checkpoints.TINY_V32)
    weights = checkpoints.tensors(config)
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    with pytest.raises(BadInput, match=rf"{name} has shape \(512, 128\), expected \(128, 512\)"):
        build(config, {**weights, name: weights[name].T}.__getitem__)
    with pytest.raises(BadInput, match=rf"{name} is torch.float16, expected float32 or bfloat16"):
        build(config, {**weights, name: weights[name].half()}.__getitem__)
