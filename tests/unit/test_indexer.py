"""Deterministic top-k and index scores against loops."""

from __future__ import annotations

import pytest
import torch

from ess.models import indexer
from ess.models.indexer import Probe, index_scores, select, top_k
from tests.kernels.sets import reference


def best_by_sorting(scores: list[float], length: int, k: int) -> list[int]:
    order = sorted(range(length), key=lambda position: (-scores[position], position))
    chosen = sorted(order[:k])
    return chosen + [-1] * (k - len(chosen))


@pytest.mark.parametrize("levels", [1, 2, 3, 1000])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 3), (64, 16), (64, 64), (20, 32)])
def test_top_k_with_ties_takes_the_lowest_positions(levels: int, width: int, k: int) -> None:
    generator = torch.Generator().manual_seed(levels + width + k)
    scores = torch.randint(-levels, levels + 1, (50, width), generator=generator).float()
    lengths = torch.randint(1, width + 1, (50,), generator=generator)
    chosen = top_k(scores, lengths, k)
    assert chosen.dtype == torch.int32
    for row in range(50):
        expected = best_by_sorting(scores[row].tolist(), int(lengths[row]), k)
        assert chosen[row].tolist() == expected
    assert torch.equal(chosen, reference.top_k(scores, lengths, k=k))


def test_top_k_never_sees_beyond_the_length_and_treats_signed_zeros_as_tied() -> None:
    scores = torch.tensor([[0.0, -0.0, -0.0, 0.0, torch.nan, torch.inf]])
    assert top_k(scores, torch.tensor([4]), 2).tolist() == [[0, 1]]
    assert top_k(scores, torch.tensor([5]), 2).tolist() == [[0, 4]], "NaN is seen"


def test_scores_equal_the_formula_whatever_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(9, 4, 8, generator=generator)
    weights = torch.randn(9, 4, generator=generator)
    keys = torch.randn(13, 8, generator=generator)
    whole = index_scores(queries, weights, keys)
    for t in range(9):
        for s in range(13):
            terms = [
                float(weights[t, j]) * max(float(queries[t, j] @ keys[s]), 0.0) for j in range(4)
            ]
            assert float(whole[t, s]) == pytest.approx(sum(terms), abs=1e-5)
    lengths = torch.arange(5, 14)
    selection = top_k(whole, lengths, 4)
    monkeypatch.setattr(indexer, "SCORE_ELEMENTS", 100)
    assert torch.allclose(index_scores(queries, weights, keys), whole, atol=1e-6)
    assert torch.equal(select(Probe(queries, weights, keys), keys, lengths, 4), selection)
