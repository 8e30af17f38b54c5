"""Prompts of DeepSeek-V4 that one engine prefills and another one decodes: entries, and a state."""

from __future__ import annotations

import pytest
import torch

from ess.engine.request import Request
from ess.engine.tokens.sampling import Sampling
from tests.compressed import world
from tests.compressed.test_engine import LINE, PAGE, told
from tests.pd.rigs import Pair
from tests.pd.test_handoff_ends import assert_free

LENGTHS = (1, 2, 4, 5, 8, 9, PAGE, PAGE + 1, PAGE + 2, PAGE + 5, 530)
MADE = 6


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pair_of(*, spelling: str = "listed", pools=None, prefill_pools=None, **config) -> Pair:
    model = {"model": world.tiny(spelling)}
    return Pair(
        pools={**model, **(pools or {})}, prefill_pools={**model, **(prefill_pools or {})}, **config
    )


def wish(count: int = MADE) -> Sampling:
    return Sampling(tokens_max=count, ignore_eos=True)


def said(taken: Request, length: int, *, line: int = 0, count: int = MADE) -> None:
    assert taken.output == told(length, line=line, count=count), length


def test_tokens_are_those_of_the_plain_model() -> None:
    pair = pair_of()
    added = [pair.add(LINE[:length], wish()) for length in LENGTHS]
    pair.run()
    for (given, taken), length in zip(added, LENGTHS, strict=True):
        assert given.reason == "sent"
        said(taken, length)
    assert pair.decode.port.stats().landed == len(LENGTHS)
    assert_free(pair.prefill, pair.decode)
