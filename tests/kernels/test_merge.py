"""The merge of partials: its algebra, its empties, and attention cut into parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels.merge import Partial, adapt, merge
from tests.kernels.sets import cpu, plain_attention, reference

Merge = Callable[..., Partial]

WIDTH = 5
both = pytest.mark.parametrize(
    "merge", [merge, reference.merge, cpu.merge], ids=["ess.merge", "reference", "cpu"]
)


def same_bits(one: Partial, other: Partial) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def empty_like(partial: Partial) -> Partial:
    return Partial(torch.zeros_like(partial.out), torch.full_like(partial.lse, -math.inf))


def wild_partial(seed: int, count: int) -> Partial:
    """Any finite out, lse from nothing to the ends of float32."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, (count, WIDTH), dtype=np.uint32).view(np.float32)
    wild = rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    near = rng.uniform(-90, 90, count).astype(np.float32)
    lse = np.choose(rng.integers(0, 3, count), [wild, near, np.full_like(near, -np.inf)])
    lse = torch.from_numpy(lse).nan_to_num(nan=0.0, posinf=3e38, neginf=-math.inf)
    out = torch.from_numpy(bits).nan_to_num(nan=-0.0, posinf=3e38, neginf=-3e38)
    return Partial(out.masked_fill((lse == -math.inf)[:, None], 0.0), lse)


@both
def test_the_algebra_holds_for_many_wild_partials(merge: Merge) -> None:
    first, second = wild_partial(1, 200_000), wild_partial(2, 200_000)
    merged = merge(first, second)
    same_bits(merged, merge(second, first))
    same_bits(merge(first, empty_like(first)), first)
    assert merged.out.isfinite().all()
    assert not merged.lse.isnan().any()
    assert torch.all(merged.lse >= torch.maximum(first.lse, second.lse))
    low, high = torch.minimum(first.out, second.out), torch.maximum(first.out, second.out)
    both = (first.lse > -math.inf) & (second.lse > -math.inf)
    slack = torch.maximum(low.abs(), high.abs()) * 2**-22
    assert torch.all((merged.out >= low - slack) & (merged.out <= high + slack) | ~both[:, None])


@both
def test_two_sides_merge_as_by_hand(merge: Merge) -> None:
    first = Partial(torch.tensor([[1.0, 2.0]]), torch.tensor([0.0]))
    second = Partial(torch.tensor([[5.0, -2.0]]), torch.tensor([math.log(3.0)]))
    merged = merge(first, second)
    torch.testing.assert_close(merged.out, torch.tensor([[4.0, -1.0]]))
    torch.testing.assert_close(merged.lse, torch.tensor([math.log(4.0)]))


@both
def test_outs_near_the_end_of_float32_do_not_overflow(merge: Merge) -> None:
    great = Partial(torch.tensor([[3e38, -3e38]]), torch.tensor([1.0]))
    same_bits(Partial(merge(great, great).out, great.lse), great)


def attention_in_parts(part_count: int, seed: int) -> tuple[Partial, list[Partial]]:
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(6, 3, 24, generator=generator)
    rows = torch.randn(200, 24, generator=generator)
    slots = torch.stack([torch.randperm(200, generator=generator)[:60] for _ in range(6)])
    owner = torch.randint(part_count, slots.shape, generator=generator)
    owner[0] = 0  # query 0 finds everything in part 0, so the others are empty

    def attend(named: torch.Tensor) -> Partial:
        return plain_attention(reference, queries, rows, named, latent_dim=16, scale=0.2)

    return attend(slots), [attend(slots.where(owner == part, -1)) for part in range(part_count)]


@pytest.mark.parametrize("part_count", [1, 2, 3, 7])
def test_attention_in_parts_is_attention(part_count: int) -> None:
    for seed in range(3):
        whole, parts = attention_in_parts(part_count, seed)
        merged = functools.reduce(merge, parts)
        torch.testing.assert_close(merged.out, whole.out, atol=1e-6, rtol=0)
        torch.testing.assert_close(merged.lse, whole.lse, atol=2e-6, rtol=0)
        same_bits(Partial(merged.out[0], merged.lse[0]), Partial(whole.out[0], whole.lse[0]))


@pytest.mark.parametrize("part_count", [3, 4])
def test_many_parts_merge_in_one_call(part_count: int) -> None:
    _, parts = attention_in_parts(part_count, 5)
    want = functools.reduce(merge, parts)
    same_bits(merge(*parts), want)
    for place in range(part_count):
        copies = [Partial(*map(torch.clone, part)) for part in parts]
        given_back = merge(*copies, into=copies[place])
        assert given_back is copies[place]
        same_bits(given_back, want)
        for part, copy in zip(parts, copies, strict=True):
            assert copy is given_back or torch.equal(copy.out, part.out)
    with pytest.raises(BadInput, match=r"part 3\.lse has shape \(2, 3\), must be \(6, 3\)"):
        merge(parts[0], parts[1], Partial(parts[2].out, parts[2].lse[:2]))


@both
def test_a_kept_dimension_of_lse_is_blamed_on_lse(merge: Merge) -> None:
    good = Partial(torch.zeros(3, 4, 24), torch.zeros(3, 4))
    kept = Partial(good.out, good.lse[..., None])
    for sides, name in (((kept, good), "first"), ((good, kept), "second")):
        match = rf"{name}\.lse has shape \(3, 4, 1\), must be \(3, 4\)"
        with pytest.raises(BadInput, match=match):
            merge(*sides)
    with pytest.raises(BadInput, match=r"first.lse has type torch.float64, must be torch.float32$"):
        merge(Partial(good.out, good.lse.double()), good)


@both
def test_into_may_be_a_side(merge: Merge) -> None:
    _, (first, second) = attention_in_parts(2, 9)
    want = merge(first, second)
    fresh = Partial(torch.full_like(first.out, 7), torch.full_like(first.lse, 7))
    for into in (fresh, Partial(*map(torch.clone, first))):
        given_back = merge(first, second, into=into)
        assert given_back.out.data_ptr() == into.out.data_ptr()
        same_bits(into, want)
    same_bits(merge(first, second, into=first), want)
    _, (first, second) = attention_in_parts(2, 9)
    merge(first, second, into=second)
    same_bits(second, want)


@both
def test_strided_sides_give_the_same_bits(merge: Merge) -> None:
    _, (first, second) = attention_in_parts(2, 4)
    turned = Partial(first.out.transpose(0, 1).contiguous().transpose(0, 1), first.lse.T.clone().T)
    assert not turned.out.is_contiguous()
    same_bits(merge(turned, second), merge(first, second))


@both
def test_plus_infinity_is_loud(merge: Merge) -> None:
    ordinary = Partial(torch.ones(1, 2), torch.zeros(1))
    foreign = Partial(torch.zeros(1, 2), torch.full((1,), math.inf))
    assert merge(ordinary, foreign).out.isnan().all()
    assert merge(foreign, ordinary).lse.isnan().all()


def test_both_merges_are_near_each_other() -> None:
    for width in (1, 5, 16, 512):
        generator = torch.Generator().manual_seed(width)
        sides = [
            Partial(
                torch.randn(40, width, generator=generator), torch.randn(40, generator=generator)
            )
            for _ in range(2)
        ]
        ours, want = cpu.merge(*sides), merge(*sides)
        torch.testing.assert_close(ours.out, want.out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours.lse, want.lse, atol=1e-6, rtol=1e-6)


def test_adapt_converts_at_the_door() -> None:
    garbage = torch.tensor([[1.0, 2.0], [math.nan, 3.0]], dtype=torch.bfloat16)
    lse = torch.tensor([3.0, math.inf])
    ours = adapt(garbage, lse, empty="+inf")
    assert ours.out.tolist() == [[1, 2], [0, 0]]
    assert ours.lse.tolist() == [3, -math.inf]
    assert ours.out.dtype == ours.lse.dtype == torch.float32
    base_2 = adapt(garbage, torch.tensor([3.0, -math.inf]), base="2", empty="-inf")
    torch.testing.assert_close(base_2.lse, torch.tensor([math.log(8.0), -math.inf]))
    assert base_2.out[1].tolist() == [0, 0]
    # a mark that was not announced is not hidden
    assert adapt(garbage, lse, empty="-inf").lse[1] == math.inf
    with pytest.raises(BadInput, match="base '10'"):
        adapt(garbage, lse, base="10", empty="+inf")


@both
def test_wrong_sides_are_refused_and_change_nothing(merge: Merge) -> None:
    one = Partial(torch.zeros(4, 2), torch.zeros(4))
    into = Partial(torch.full((4, 2), 7.0), torch.full((4,), 7.0))
    for other in (
        Partial(torch.zeros(4, 3), torch.zeros(4)),
        Partial(torch.zeros(4, 2), torch.zeros(1)),
        Partial(torch.zeros(4, 2).double(), torch.zeros(4)),
        Partial(torch.zeros(4, 2), torch.zeros(4).half()),
    ):
        with pytest.raises(BadInput, match="second"):
            merge(one, other, into=into)
        with pytest.raises(BadInput):
            merge(other, one, into=into)
    with pytest.raises(BadInput, match="into"):
        merge(one, one, into=Partial(into.out[:2], into.lse[:2]))
    for sides, says in (
        (((one.out, 0.5), one), "first.lse is float, must be a tensor"),
        ((one, (one.out, 0.5)), "second.lse is float, must be a tensor"),
        ((one, (0.5, one.lse)), "second.out is float, must be a tensor"),
        ((one, one.out), r"second is Tensor, must be a pair \(out, lse\)"),
        (((one.out, one.lse, one.lse), one), r"first is tuple, must be a pair \(out, lse\)"),
        ((one, [one.out, one.lse]), r"second is list, must be a pair \(out, lse\)"),
        (((torch.tensor(1.0), one.lse), one), r"first.out has shape \(\), must be \(4, any\)"),
    ):
        with pytest.raises(BadInput, match=says):
            merge(*sides, into=into)
    with pytest.raises(BadInput, match=r"into\.lse is float"):
        merge(one, one, into=Partial(into.out, 0.5))
    assert (into.out == 7).all()
