"""Both families against transformers 5.23 itself: random fp32 checkpoints, 8 x top-k tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ess.models.load import EMBEDDED
from ess.models.plain import Plain
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.rank import RankWeights
from tests.model import grid
from tests.support import checkpoints
from tests.support.few import few
from tests.support.greedy import greedy
from tests.support.walk import walk

pytest.importorskip("transformers", reason="extra `oracle` (transformers==5.23.0) is not installed")
from tests.support.oracle import Answer, Oracle

pytestmark = pytest.mark.slow
LENGTH, PREFILL, TOLERANCE, TIE = 512, 448, 1e-4, 5e-6
PIECES = [PREFILL] + [1] * 16 + [4] * 12
RAWS: dict[str, dict[str, Any]] = {
    "deepseek_v32": checkpoints.V32,
    "glm_moe_dsa": checkpoints.GLM,
    "glm_moe_dsa-all-full": {**checkpoints.GLM, "index_topk_freq": 1},
    "glm_moe_dsa-listed": {**checkpoints.GLM, "indexer_types": ["full", "shared"] * 2},
}
# Tokens for which no selection hangs on rounding: every k-th score leads the next by TIE.
SEEDS = {
    "deepseek_v32": 22,
    "glm_moe_dsa": 24,
    "glm_moe_dsa-all-full": 27,
    "glm_moe_dsa-listed": 24,
}


class Case:
    def __init__(self, raw: dict[str, Any], oracle: Oracle, seed: int) -> None:
        self.raw = raw
        self.oracle = oracle
        self.model = checkpoints.model(raw, latent_norm_eps=1e-6)
        self.tokens = checkpoints.tokens(LENGTH, raw["vocab_size"], seed=seed)
        self.answer: Answer = oracle.read(self.tokens, [LENGTH])


@pytest.fixture(scope="module", params=few(sorted(RAWS)[:2], all_of=sorted(RAWS)))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    raw = RAWS[request.param]
    weights = checkpoints.tensors(checkpoints.model(raw).config)
    return Case(raw, Oracle(tmp_path_factory.mktemp("oracle"), raw, weights), SEEDS[request.param])


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def test_prefill_has_the_logits_of_transformers(case: Case) -> None:
    logits = Plain(case.model).run(case.tokens).logits
    assert far(logits, case.answer.logits) < TOLERANCE
    assert torch.equal(logits.argmax(-1), case.answer.logits.argmax(-1))


def test_cached_decode_by_one_and_by_four(case: Case) -> None:
    theirs = case.oracle.read(case.tokens, PIECES)
    plain, logits, start = Plain(case.model), [], 0
    for count in PIECES:
        logits.append(plain.run(case.tokens[start : start + count]).logits)
        start += count
    assert far(torch.cat(logits), theirs.logits) < TOLERANCE
    assert torch.equal(torch.cat(logits).argmax(-1), theirs.logits.argmax(-1))


def test_greedy_tokens_are_those_of_transformers(case: Case) -> None:
    prompt = case.tokens[:300]
    assert greedy(case.model, prompt, 32) == case.oracle.greedy(prompt, 32)


def test_rows_and_keys_are_those_of_transformers(case: Case) -> None:
    plain = Plain(case.model)
    plain.run(case.tokens)
    for layer, rows, keys in zip(plain.layers, case.answer.rows, case.answer.keys, strict=True):
        assert far(layer.rows.filled, rows) < TOLERANCE
        assert (keys is None) == (layer.keys.length == 0)
        if keys is not None:
            assert far(layer.keys.filled, keys) < TOLERANCE


def test_selection_recall_is_one_up_to_tied_scores(case: Case) -> None:
    top_k = case.model.config.top_k
    by_hand = walk(case.model, case.tokens)
    assert by_hand.margin(top_k) > TIE
    triples = zip(by_hand.scores, by_hand.selections, case.answer.selections, strict=True)
    for scores, ours, theirs in triples:
        for position in range(top_k, LENGTH):
            missed = set(theirs[position].tolist()) - set(ours[position].tolist())
            least = scores[position, ours[position].long()].min()
            for each in missed:
                assert abs(scores[position, each] - least) < TIE, f"position {position}: {each}"


def test_top_k_beyond_the_length_is_dense(case: Case, tmp_path_factory: Any) -> None:
    raw = {**case.raw, "index_topk": LENGTH}
    weights = checkpoints.tensors(case.model.config)
    theirs = Oracle(tmp_path_factory.mktemp("dense"), raw, weights).read(case.tokens, [LENGTH])
    outcome = Plain(checkpoints.model(raw, latent_norm_eps=1e-6)).run(case.tokens)
    assert all(selection is None for selection in outcome.selections)
    assert far(outcome.logits, theirs.logits) < TOLERANCE


def test_the_wrong_rope_in_the_indexer_fails(case: Case) -> None:
    wrong = not case.model.config.index_rope_interleaved
    model = checkpoints.model(case.raw, latent_norm_eps=1e-6, index_rope_interleaved=wrong)
    logits = Plain(model).run(case.tokens).logits
    assert far(logits, case.answer.logits) > 1000 * TOLERANCE


def test_the_latent_eps_switch_is_needed_for_glm(case: Case) -> None:
    """transformers keeps 1e-6 on the two latents; servers, and ESS, follow rms_norm_eps."""
    logits = Plain(checkpoints.model(case.raw)).run(case.tokens[:64]).logits
    distance = far(logits, case.answer.logits[:64])
    follows = case.raw["rms_norm_eps"] == 1e-6
    assert distance < 1e-5 if follows else 1e-5 < distance < 1e-3


SPANS = ((0, 1), (5, 7), (0, 300), (40, 170), (0, 280))


def grid_weights(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if name in grid.RANDOM:
        raw = grid.RANDOM[name]
        return raw, checkpoints.tensors(checkpoints.model(raw).config)
    with Checkpoint(EMBEDDED) as stored:
        rank = RankWeights(stored, form="f32")
        weights = {key: rank.tensor(key) for key in stored.specs}
        raw = {k: v for k, v in stored.config.items() if k != "quantization_config"}
        return raw | {"torch_dtype": "float32"}, weights


@pytest.mark.parametrize("name", grid.FACTORS["checkpoint"])
def test_what_the_grid_expects_is_what_transformers_says(name: str, tmp_path: Path) -> None:
    oracle = Oracle(tmp_path, *grid_weights(name))
    for start, stop in SPANS:
        theirs = oracle.greedy(grid.text(name)[start:stop], grid.TOKEN_COUNT)
        assert grid.expected(name, start, stop) == theirs, (start, stop)
