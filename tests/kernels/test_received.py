"""Tokens come to their experts, sums go back: up to the last end, which the device alone knows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from ess.kernels.experts import swiglu
from ess.kernels.received import added, gated, taken
from tests.kernels.sets import SETS, op_set
from tests.kernels.test_triton_ops import device

POISON = 7.0
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Any:
    """A backend's own functions; tensors go where its kernels are."""
    made = op_set(request.param)
    return getattr(made, "_ops", made).backend


def home(ops: Any) -> str:
    return device() if ops.__name__.startswith("ess.kernels.cuda") else "cpu"


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends_of(count: int) -> Tensor:
    return torch.tensor([0, count // 2, count], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5, 11])
def test_tokens_are_taken_as_far_as_the_last_end(ops: Any, dtype: torch.dtype, count: int) -> None:
    there = home(ops)
    tokens, lines = drawn(6, 1030, dtype=dtype), torch.tensor([3, 0, 0, 5, 1, 2, 4, 3, 3, 1, 0])
    out = torch.full((11, 1030), POISON, dtype=dtype, device=there)
    ops.take_received(tokens.to(there), lines.to(there), ends_of(count).to(there), out)
    wanted = torch.full((11, 1030), POISON, dtype=dtype)
    wanted[:count] = tokens[lines[:count]]
    assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "limit"), [(0, 0.0), (3, 0.0), (5, 0.5)])
def test_gates_are_those_of_one_rank(
    ops: Any, dtype: torch.dtype, count: int, limit: float
) -> None:
    """What lies behind is NaN, and stays unread."""
    there, both = home(ops), 3 * drawn(5, 2 * 72, dtype=dtype)
    both[count:] = torch.nan
    out = torch.full((5, 72), POISON, dtype=dtype, device=there)
    ops.gate_received(both.to(there), ends_of(count).to(there), limit, out)
    assert (out[count:] == POISON).all()
    wanted = swiglu(both[:count].float(), limit).to(dtype)
    within = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out[:count].cpu(), wanted, rtol=within, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_sums_are_in_order_and_of_lines_that_are_here(
    ops: Any, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """One after the other in float32: bit for bit. Lines that no place names are NaN."""
    there, made = home(ops), drawn(9, 1030, dtype=dtype)
    places = torch.tensor([[0, -1, 4], [-1, -1, -1], [8, 2, 1], [5, 5, -1]])
    made[[3, 6, 7]] = torch.nan
    weights = drawn(4, 3, seed=1).abs()
    out = torch.full((4, 1030), POISON, dtype=out_dtype, device=there)
    ops.add_received(made.to(there), places.to(there), weights.to(there), out)
    wanted = torch.zeros(4, 1030)
    for token, named in enumerate(places.tolist()):
        for place, weight in zip(named, weights[token], strict=True):
            if place >= 0:
                wanted[token] += made[place].float() * weight
    assert torch.equal(out.cpu(), wanted.to(out_dtype))


def test_a_rank_that_receives_nothing_makes_nothing(ops: Any) -> None:
    there = home(ops)
    none = torch.empty(0, 8, device=there)
    numbers = torch.empty(0, dtype=torch.int64, device=there)
    ends = ends_of(0).to(there)
    ops.take_received(torch.ones(3, 8, device=there), numbers, ends, none)
    ops.gate_received(torch.empty(0, 16, device=there), ends, 0.0, none)
    places = torch.empty(0, 2, dtype=torch.int64, device=there)
    ops.add_received(torch.ones(3, 8, device=there), places, places.float(), none)


@pytest.mark.parametrize("seed", range(6))
def test_any_sizes_again_and_again(ops: Any, seed: int) -> None:
    """Odd widths, a token for each line and none; what is not asked for is NaN. Repeated calls give
    the same bits, also into memory that held something else."""
    at = random.Random(seed)
    width, lines, named = at.choice([1, 7, 65, 129, 1031]), at.randrange(1, 40), at.randrange(1, 9)
    count, there = at.randrange(lines + 1), home(ops)
    tokens, both = drawn(5, width, seed=seed), drawn(lines, 2 * width, seed=seed + 1)
    both[count:] = torch.nan
    which = torch.tensor([at.randrange(5) for _ in range(lines)])
    places = torch.tensor([[at.randrange(-1, count) for _ in range(named)] for _ in range(5)])
    weights, made = drawn(5, named, seed=seed + 2), both[:, :width].contiguous()
    wanted = torch.zeros(5, width)
    for place, weight in zip(places.T, weights.T, strict=True):
        line = made[place.clamp_min(0)] * weight[:, None]
        wanted += line.where(place[:, None] >= 0, 0.0)
    before: list[Tensor] | None = None
    for poison in (POISON, torch.nan, -POISON):
        took, gate = (torch.full((lines, width), poison, device=there) for _ in range(2))
        sums = torch.full((5, width), poison, device=there)
        ends = ends_of(count).to(there)
        ops.take_received(tokens.to(there), which.to(there), ends, took)
        ops.gate_received(both.to(there), ends, 0.0, gate)
        ops.add_received(made.to(there), places.to(there), weights.to(there), sums)
        again = [took[:count].cpu(), gate[:count].cpu(), sums.cpu()]
        assert before is None or all(map(torch.equal, before, again))
        before = again
    assert before is not None
    assert torch.equal(before[0], tokens[which[:count]])
    torch.testing.assert_close(before[1], swiglu(both[:count], 0.0), rtol=1e-5, atol=1e-6)
    assert torch.equal(before[2], wanted)


def test_lines_that_lie_apart_are_read_as_they_are() -> None:
    tokens, both, made = drawn(5, 14)[:, ::2], drawn(12, 6, seed=1).T, drawn(14, 9, seed=2)[::2]
    which, ends = torch.tensor([4, 4, 0, 2, 1, 3]), ends_of(6)
    places = torch.tensor([[0, 6, -1], [3, -1, 2]]).T
    weights = drawn(2, 3, seed=3).T
    dense = [each.contiguous() for each in (tokens, both, made, places, weights)]
    assert torch.equal(taken(tokens, which, ends), taken(dense[0], which, ends))
    assert torch.equal(gated(both, ends, 0.5), gated(dense[1], ends, 0.5))
    summed = added(made, places, weights, torch.float32)
    assert torch.equal(summed, added(dense[2], dense[3], dense[4], torch.float32))
