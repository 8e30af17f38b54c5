from __future__ import annotations

import numpy as np
import pytest

from ess.errors import BadInput
from ess.models.tiny.trainer.texts import ngram


def _tokens(count: int, vocabulary: int, seed: int = 0) -> ngram.npt.NDArray[np.uint16]:
    steps = np.random.default_rng(seed).integers(0, 3, count)
    return (np.cumsum(steps) % vocabulary).astype(np.uint16)


def test_probabilities_sum_to_one() -> None:
    levels = ngram.train(_tokens(2000, 11))
    for context in ([1, 2, 3, 4], [5, 5, 5, 5], [9, 1, 9, 1]):
        texts = [np.array([*context, token], dtype=np.uint16) for token in range(11)]
        bits = [ngram.bits(levels, text, vocabulary=11)[-1] for text in texts]
        assert sum(2.0**-each for each in bits) == pytest.approx(1.0)


def test_it_learns_the_order() -> None:
    levels = ngram.train(_tokens(20_000, 64))
    text = _tokens(5_000, 64, seed=1)
    assert ngram.bits(levels, text, vocabulary=64).mean() < 1.85
    shuffled = np.random.default_rng(2).permutation(text)
    assert ngram.bits(levels, shuffled, vocabulary=64).mean() > 5


def test_keys_are_exact() -> None:
    tokens = np.array([4095, 0, 4095, 1, 2, 3], dtype=np.uint16)
    keys = ngram.gram_keys(tokens, 5)
    assert keys.tolist() == [
        sum(int(token) << 12 * (4 - at) for at, token in enumerate(tokens[start : start + 5]))
        for start in range(2)
    ]


def test_bad_input_is_named() -> None:
    with pytest.raises(BadInput, match="3 tokens are too few"):
        ngram.train(np.zeros(3, dtype=np.uint16))
    with pytest.raises(BadInput, match="token 4096"):
        ngram.train(np.full(9, 4096, dtype=np.uint16))
