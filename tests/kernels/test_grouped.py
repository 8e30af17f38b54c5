"""Products of tokens with their experts' weights, in every set of ops, against the loop itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels.ops import Ops
from tests.kernels.sets import SETS, op_set, says_so

POISON = 7.0
FP8 = torch.float8_e4m3fn
FORMS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
]


class Case(NamedTuple):
    tokens: torch.Tensor
    ends: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None
    out: torch.Tensor

    def run(self, ops: Ops) -> torch.Tensor:
        given = self.tokens, self.ends, self.weights
        return ops.expert_products(*given, scales=self.scales, out=self.out)


def make(
    counts: Sequence[int],
    token: torch.dtype,
    weight: torch.dtype,
    *,
    width: int = 150,
    depth: int = 200,
    behind: int = 2,
    seed: int = 0,
) -> Case:
    """Sizes no tile divides; tokens and results lie in gaps, and behind the last end is NaN."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(counts) + behind
    tokens = torch.full((count, depth + 8), math.nan, dtype=token)[:, :depth]
    tokens[: sum(counts)] = torch.randn(sum(counts), depth, generator=generator).to(token)
    weights = torch.randn(len(counts), width, depth, generator=generator).to(weight)
    blocks = len(counts), -(-width // 128), -(-depth // 128)
    scales = torch.rand(blocks, generator=generator) + 0.1 if weight == FP8 else None
    ends = torch.tensor(counts).cumsum(0).int()
    out = torch.full((count, width + 3), POISON, dtype=token)[:, :width]
    return Case(tokens, ends, weights, scales, out)


def by_loop(case: Case) -> np.ndarray:
    """In NumPy and float64, token by token; rows behind the last end are as they were."""
    weights = case.weights.double().numpy()
    if case.scales is not None:
        width, depth = weights.shape[1:]
        scales = case.scales.double().numpy()
        weights = weights * np.kron(scales, np.ones((1, 128, 128)))[:, :width, :depth]
    made = np.full(case.out.shape, POISON)
    for token in range(int(case.ends[-1])):
        expert = int((case.ends <= token).sum())
        made[token] = weights[expert] @ case.tokens[token].double().numpy()
    return made


def close(ours: torch.Tensor, want: np.ndarray, case: Case) -> None:
    """Float32 sums of a few hundred numbers; in bfloat16 also the rounding of the result."""
    exact = torch.from_numpy(want)
    within = 2**-8 if case.out.dtype == torch.bfloat16 else 2**-19
    greatest = float(exact[: int(case.ends[-1])].abs().amax()) if case.ends[-1] else 0.0
    error = (ours.double() - exact).abs()
    assert torch.all(error <= within * exact.abs() + 2**-18 * greatest), error.max()


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


@pytest.mark.parametrize(("token", "weight"), FORMS)
def test_every_token_meets_its_expert(ops: Ops, token: torch.dtype, weight: torch.dtype) -> None:
    """Experts without tokens at both ends and between, one whose tokens fill more than a tile."""
    case = make([0, 3, 0, 0, 19, 1, 0], token, weight)
    ours = case.run(ops)
    assert ours is case.out
    close(ours, by_loop(case), case)


@pytest.mark.parametrize("counts", [[5], [0, 0, 18, 0], [0, 0], [1] * 40], ids=str)
def test_all_to_one_none_at_all_and_one_each(ops: Ops, counts: list[int]) -> None:
    case = make(counts, torch.bfloat16, FP8, width=40, depth=136)
    close(case.run(ops), by_loop(case), case)


def test_a_token_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    """Its bits beside other experts are those that it gets alone, and no NaN of theirs reaches
    it."""
    case = make([4, 20, 3], torch.bfloat16, FP8, behind=0)
    whole = case.run(ops).clone()
    case.tokens[[0, 5, 25]] = math.nan
    spoilt = case.run(ops)
    kept = torch.ones(27, dtype=torch.bool)
    kept[[0, 5, 25]] = False
    assert torch.equal(spoilt[kept], whole[kept])
    assert spoilt[~kept].isnan().all()
    for token, alone in ((1, [1, 0, 0]), (17, [0, 1, 0]), (26, [0, 0, 1])):
        lone = Case(
            case.tokens[token : token + 1],
            torch.tensor(alone).cumsum(0).int(),
            *case[2:4],
            torch.empty(1, 150, dtype=torch.bfloat16),
        )
        assert torch.equal(lone.run(ops)[0], whole[token])


@pytest.mark.parametrize("experts", [range(4), range(1, 3), range(3, 4)], ids=str)
def test_some_experts_write_their_lines_alone(ops: Ops, experts: range) -> None:
    """From a beginning that, like the ends, only the device knows."""
    case = make([3, 0, 20, 2], torch.bfloat16, FP8)
    whole = case.run(ops).clone()
    edges = torch.nn.functional.pad(case.ends, (1, 0))
    first, stop = int(edges[experts.start]), int(edges[experts.stop])
    part = slice(experts.start, experts.stop)
    case.out.fill_(POISON)
    ops.expert_products(
        case.tokens,
        case.ends[part],
        case.weights[part],
        scales=case.scales[part],
        begin=edges[experts.start : experts.start + 1],
        out=case.out,
    )
    assert torch.equal(case.out[first:stop], whole[first:stop])
    assert (case.out[:first] == POISON).all()
    assert (case.out[stop:] == POISON).all()


def test_without_a_place_it_is_made(ops: Ops) -> None:
    case = make([2, 3], torch.bfloat16, torch.bfloat16)
    ours = ops.expert_products(case.tokens, case.ends, case.weights)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours[:5], case.run(ops)[:5])
    assert (ours[5:] == 0).all()
    nothing = ops.expert_products(case.tokens[:0], torch.zeros(2).int(), case.weights)
    assert nothing.shape == (0, 150)


def test_codes_that_are_no_numbers_are_seen(ops: Ops) -> None:
    case = make([1, 1], torch.float32, FP8)
    case.weights.view(torch.uint8)[0, 7, 9] = 0x7F
    assert case.run(ops)[:2].isnan().nonzero().tolist() == [[0, 7]]


def test_bad_input_changes_nothing(ops: Ops) -> None:
    case = make([2, 3], torch.bfloat16, FP8)
    good = case._asdict()
    for wrong, says in (
        ({"tokens": case.tokens.double()}, "tokens has type torch.float64"),
        ({"tokens": case.tokens[:, :9]}, r"weights has shape \(2, 150, 200\), must be .*, 9\)"),
        ({"tokens": case.tokens[:, :0], "weights": case.weights[..., :0]}, "have no depth"),
        ({"ends": case.ends.long()}, "ends has type torch.int64"),
        ({"ends": case.ends[:1]}, r"ends has shape \(1,\), must be \(2\)"),
        ({"ends": case.ends.flip(0)}, r"ends\[1\] is 2, outside 5..7"),
        ({"ends": case.ends + 3}, r"ends\[1\] is 8, outside 5..7"),
        ({"scales": None}, "weights of torch.float8_e4m3fn with no scales"),
        ({"weights": case.weights.float()}, "weights of torch.float32 with scales"),
        ({"scales": good["scales"][:, :1]}, r"scales has shape \(2, 1, 2\), must be \(2, 2, 2\)"),
        ({"out": case.out[:, :9]}, r"out has shape \(7, 9\), must be \(7, 150\)"),
    ):
        if says_so(ops, says):
            with pytest.raises(BadInput, match=says):
                Case(**good | wrong).run(ops)
        assert (case.out == POISON).all()
