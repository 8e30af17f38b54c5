"""Prompts of every family that one engine prefills and another one decodes."""

from __future__ import annotations

import pytest

from ess.engine.tokens.sampling import Sampling
from tests.families.test_covered import FURTHER
from tests.model import grid
from tests.pd.rigs import Pair
from tests.support.greedy import greedy

TOKEN_COUNT = 8
SPANS = ((0, 66), (0, 129), (40, 200), (0, 200))


@pytest.mark.slow
@pytest.mark.parametrize("family", FURTHER)
def test_tokens_are_those_of_the_plain_model(family: str) -> None:
    model, text = grid.checkpoint(family), grid.text(family)
    pair = Pair(pools={"model": model}, prefill_pools={"model": model})
    wish = Sampling(tokens_max=TOKEN_COUNT, ignore_eos=True)
    added = [pair.add(text[start:stop], wish) for start, stop in SPANS]
    pair.run()
    expected = [greedy(model, text[start:stop], TOKEN_COUNT) for start, stop in SPANS]
    assert [taken.output for _, taken in added] == expected
    assert pair.decode.port.counts.landed_count == len(SPANS)
