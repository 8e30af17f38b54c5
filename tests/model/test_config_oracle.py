"""What config.json says, key by key, against transformers 5.23: the same logits in fp32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from ess.models.config import ModelConfig
from ess.models.config_json.reading import EQUAL, FIXED, FOREIGN
from ess.models.layers import rope_frequencies
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.plain import Plain
from ess.models.registry import read_config
from tests.support import checkpoints
from tests.support.config_keys import BASES, MODEL, SAME, WITHOUT_EFFECT, changed
from tests.support.few import few
from tests.support.walk import walk

pytest.importorskip("transformers", reason="extra `oracle` (transformers==5.23.0) is not installed")
from tests.support.oracle import Oracle

pytestmark = pytest.mark.slow
LENGTH, TOLERANCE, MARGIN = 80, 1e-4, 5e-6
KEPT = [
    (family, name)
    for family, name in SAME
    if name not in MODEL or "defaults" in name or list(BASES)[[*MODEL].index(name) % 2] == family
]
"""What both families read alike is compared in one of them, in turn."""


def clear_tokens(model: Model) -> list[int]:
    """Tokens for which no selection hangs on rounding."""
    for seed in range(100):
        tokens = checkpoints.tokens(LENGTH, model.config.vocab_size, seed=seed)
        if walk(model, tokens).margin(model.config.top_k) > MARGIN:
            return tokens
    raise AssertionError("no tokens with clear selections in 100 tries")


def distance(oracle: Oracle, model: Model) -> float:
    """Between the logits of both for the same tokens."""
    tokens = clear_tokens(model)
    theirs = oracle.read(tokens, [LENGTH]).logits
    return float((Plain(model).run(tokens).logits - theirs).abs().max())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")  # torch: n_shared_experts 0
@pytest.mark.parametrize(("family", "name"), few(KEPT, all_of=SAME))
def test_the_same_as_transformers(family: str, name: str, tmp_path: Path) -> None:
    raw = changed(family, SAME[family, name])
    model = checkpoints.model(raw, latent_norm_eps=1e-6)
    oracle = Oracle(tmp_path, raw, checkpoints.tensors(model.config))
    frequencies, scale = oracle.rotary()
    assert torch.equal(rope_frequencies(model.config), frequencies)
    assert model.config.rope.rotation_scale == pytest.approx(scale, rel=1e-15)
    assert distance(oracle, model) < TOLERANCE


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("family", BASES)
def test_what_transformers_saves_without_shared_experts(family: str, tmp_path: Path) -> None:
    """It writes tensors of no values."""
    change = {"n_shared_experts": 0, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6}
    raw = changed(family, change)
    oracle = Oracle(tmp_path / "given", raw, checkpoints.tensors(read_config(raw)))
    oracle.save(tmp_path / "saved")
    assert distance(oracle, load_model(tmp_path / "saved", form="f32")) < TOLERANCE


@pytest.mark.parametrize("family", BASES)
def test_a_stored_head_is_used_though_the_file_ties_it(family: str, tmp_path: Path) -> None:
    raw = changed(family, {"tie_word_embeddings": True, "rms_norm_eps": 1e-6})
    weights = checkpoints.tensors(read_config(changed(family, {})))
    oracle = Oracle(tmp_path, raw, weights)
    assert distance(oracle, load_model(tmp_path, form="f32")) < TOLERANCE


@pytest.mark.parametrize("family", BASES)
def test_no_key_of_transformers_is_overlooked(family: str) -> None:
    """Each field of its configuration is ours, has a value that is checked, or changes nothing."""
    from transformers import CONFIG_MAPPING

    theirs = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}
    ours = {field.encode_name for field in msgspec.structs.fields(ModelConfig)}
    checked = {*FIXED, *EQUAL, *FOREIGN, "auto_map", "layer_types"}
    elsewhere = {"architectures", "dtype"}
    assert theirs <= ours | checked | WITHOUT_EFFECT.keys() | elsewhere
