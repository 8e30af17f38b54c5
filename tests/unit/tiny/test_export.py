from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.models.registry import read_config
from ess.models.tiny.trainer.evaluate import (
    CONTEXT,
    WINDOW,
    Drafts,
    ScoredTokens,
    package_bits,
    score_tokens,
    windows,
)
from ess.models.tiny.trainer.experts import Gate
from ess.models.tiny.trainer.export import export, load_network, published_tensors
from ess.models.tiny.trainer.network import Network
from ess.models.tiny.trainer.shape import ModelShape
from ess.models.tiny.trainer.stored import read_checkpoint, stored_form
from ess.models.weights.blocks import dequantise
from ess.models.weights.expected.shapes import expected_tensors
from tests.support.checkpoints import tensors


def _network(shape: ModelShape) -> Network:
    torch.manual_seed(5)
    network = Network(shape)
    for gate in (part for part in network.modules() if isinstance(part, Gate)):
        gate.e_score_correction_bias.normal_()
    return network


def test_published_names_are_the_real_ones() -> None:
    shape = ModelShape()
    wanted = {t.name: t.shape for t in expected_tensors(read_config(shape.config(fp8=True)))}
    made = published_tensors(_network(shape))
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == wanted


def test_checkpoint_is_the_network(tmp_path: Path, small: ModelShape) -> None:
    network = _network(small)
    (tmp_path / "tokenizer.json").write_text("{}")
    tokens = torch.randint(0, 96, (1, 20))
    torch.nn.init.normal_(network.lm_head.weight)
    for form, bound in (("f32", 0.0), ("fp8", 0.3)):
        export(network, tmp_path / "tokenizer.json", tmp_path / form, form=form)
        config, read = read_checkpoint(tmp_path / form)
        again = load_network(small, read)
        gap = (again(tokens) - network(tokens)).abs().mean()
        assert gap <= bound
        assert ("quantization_config" in config) == (form == "fp8")
        assert (
            json.loads((tmp_path / form / "generation_config.json").read_text())["eos_token_id"]
            == 1
        )
    del read["model.norm.weight"]
    with pytest.raises(BadInput, match=r"1 tensors are missing, the first is model\.norm\.weight"):
        load_network(small, read)


def test_windows_score_every_token_once() -> None:
    tokens = np.arange(9000, dtype=np.uint16)
    scored: list[int] = []
    for first, batch in windows(tokens, torch.device("cpu")):
        for row, window in enumerate(batch):
            skip = 0 if first == 0 and row == 0 else CONTEXT
            scored += window[1:][skip:].tolist()
    assert scored == list(range(1, scored[-1] + 1))
    assert 9000 - scored[-1] <= WINDOW - CONTEXT
    with pytest.raises(BadInput, match="too few"):
        windows(tokens[:WINDOW], torch.device("cpu"))


def test_drafts_are_counted_against_the_trunk() -> None:
    drafts = Drafts()
    target = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    drafts.add(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), target)
    chance = target.softmax(-1)
    assert (drafts.count, drafts.agreed) == (2, 1)
    assert drafts.chance == pytest.approx(float(chance[0, 0] + chance[1, 2]))


def test_packages_share_the_bits_out() -> None:
    tokens = np.array([0, 5, 1, 0, 6, 1, 0, 7, 1], dtype=np.uint16)
    scored = ScoredTokens(np.arange(1, 9), np.log(2) * np.arange(1, 9, dtype=np.float32))
    sizes = np.array([0, 1, 9, 9, 9, 2, 3, 4])
    corpus = [
        {"package": "a", "role": "held-out", "documents": 2},
        {"package": "b", "role": "held-out", "documents": 1},
        {"package": "c", "role": "train", "documents": 9},
    ]
    rows = package_bits(scored, tokens, sizes, corpus)
    assert rows[0]["bits_per_byte"] == pytest.approx((1 + 2 + 3 + 4 + 5) / (2 + 1 + 3 + 1))
    assert rows[1]["bits_per_byte"] == pytest.approx((6 + 7 + 8) / (4 + 1))


class _Flat:
    """A network that finds every token equally likely."""

    def __init__(self) -> None:
        self.lm_head = torch.nn.Linear(4, 96, bias=False)

    def __call__(self, tokens: torch.Tensor, *, mode: str) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 4)


def test_scoring_covers_the_text_and_nothing_twice() -> None:
    tokens = np.random.default_rng(0).integers(0, 96, 12000).astype(np.uint16)
    scored = score_tokens(_Flat(), tokens, share=1.0)
    assert scored.where.tolist() == list(range(1, scored.where[-1] + 1))
    assert scored.nats == pytest.approx(np.full(scored.nats.size, np.log(96)), rel=1e-4)
    part = score_tokens(_Flat(), tokens, share=0.5)
    assert np.unique(part.where).size == part.where.size < scored.where.size


def test_what_an_fp8_checkpoint_keeps_exact(small: ModelShape) -> None:
    """Norms and the gate's correction stay f32, tables become bf16, all else is fp8 in blocks."""
    raw = small.config(fp8=True)
    config = read_config(raw)
    weights = tensors(config)
    held = stored_form(raw, weights, "fp8")
    for spec in expected_tensors(config):
        weight, scale = held[spec.name], held.get(spec.scale_name)
        if spec.role in ("norm", "correction"):
            assert torch.equal(weight, weights[spec.name])
        elif spec.role == "table":
            assert torch.equal(weight, weights[spec.name].bfloat16())
        else:
            assert scale is not None, spec.name
            restored = dequantise(weight, scale, dtype=torch.float32)
            torch.testing.assert_close(restored, weights[spec.name], rtol=1 / 16, atol=2e-4)
    with pytest.raises(BadInput, match="form 'int4' is not one of"):
        stored_form(raw, weights, "int4")
