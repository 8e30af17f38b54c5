"""The algebra of the merge, for partials that Hypothesis draws and shrinks."""

from __future__ import annotations

import math

import pytest
import torch

from ess.kernels.merge import Partial, merge
from tests.kernels.test_merge import WIDTH, empty_like, same_bits

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LSE = st.one_of(st.just(-math.inf), st.floats(-50, 50, width=32), FINITE)
LSE_NEAR = st.one_of(st.just(-math.inf), st.floats(-50, 50, width=32))
NEAR = st.floats(-8, 8, width=32)


def partials(outs: object, lses: object) -> object:
    """Four queries; where lse is -inf, out is 0."""

    def build(drawn: list[tuple[list[float], float]]) -> Partial:
        lse = torch.tensor([each for _, each in drawn])
        out = torch.tensor([row for row, _ in drawn])
        return Partial(out.masked_fill((lse == -math.inf)[:, None], 0.0), lse)

    rows = st.lists(outs, min_size=WIDTH, max_size=WIDTH)
    return st.lists(st.tuples(rows, lses), min_size=4, max_size=4).map(build)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(partials(FINITE, LSE), partials(FINITE, LSE))
def test_merge_commutes_bit_for_bit_and_never_gives_nan(first: Partial, second: Partial) -> None:
    merged = merge(first, second)
    same_bits(merged, merge(second, first))
    assert merged.out.isfinite().all()
    assert not merged.lse.isnan().any()
    assert torch.equal(
        merged.lse == -math.inf, (first.lse == -math.inf) & (second.lse == -math.inf)
    )


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(partials(FINITE, LSE))
def test_empty_is_the_identity_bit_for_bit(partial: Partial) -> None:
    same_bits(merge(partial, empty_like(partial)), partial)
    same_bits(merge(empty_like(partial), partial), partial)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(*[partials(NEAR, LSE_NEAR)] * 3)
def test_merge_associates_within_rounding(a: Partial, b: Partial, c: Partial) -> None:
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    torch.testing.assert_close(left.out, right.out, atol=4e-6, rtol=0)
    torch.testing.assert_close(left.lse, right.lse, atol=1e-5, rtol=2e-7)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(*[partials(NEAR, LSE_NEAR)] * 2)
def test_merge_is_the_formula(first: Partial, second: Partial) -> None:
    merged = merge(first, second)
    for q in range(4):
        a, b = math.exp(first.lse[q]), math.exp(second.lse[q])
        if a + b == 0:
            assert merged.out[q].tolist() == [0] * WIDTH
            assert merged.lse[q] == -math.inf
            continue
        out = (a * first.out[q].double() + b * second.out[q].double()) / (a + b)
        torch.testing.assert_close(merged.out[q].double(), out, atol=4e-6, rtol=0)
        assert float(merged.lse[q]) == pytest.approx(math.log(a + b), abs=1e-5)
