"""What top-k, top-p and min-p leave of scores: by the sort, one by one, by a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ess.kernels.calls import Cuts
from ess.kernels.cut import cut
from tests.kernels import test_index
from tests.kernels.sets import SETS, op_set
from tests.kernels.test_triton_ops import device

INF = math.inf
WAYS = {
    "nothing": (1 << 31, INF, 0.0),
    "one token": (1, INF, 0.0),
    "top-k": (7, INF, 0.0),
    "top-p": (1 << 31, 0.6, 0.0),
    "nearly all": (1 << 31, 0.9999, 0.0),
    "hardly any": (1 << 31, 1e-9, 0.0),
    "min-p": (1 << 31, INF, 0.2),
    "all but the best": (1 << 31, INF, 1.0),
    "top-k, then top-p": (9, 0.5, 0.0),
    "each": (60, 0.9, 0.05),
    "as many as there are": (300, 0.5, 0.0),
}


def cuts_of(count: int, way: tuple[int, float, float]) -> Cuts:
    top_k, top_p, min_p = way
    return Cuts(
        torch.full((count,), top_k), *(torch.full((count,), part) for part in (top_p, min_p))
    )


def one_by_one(scores: np.ndarray, way: tuple[int, float, float]) -> np.ndarray:
    """Which tokens of a line are left, by the words of the contract, in float64."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    ranked = scores[order].astype(np.float64)
    chances = np.exp(ranked - ranked[0])
    top_k, top_p, min_p = way
    within = chances[: min(top_k, len(scores))].sum()
    left, spent = np.zeros(len(scores), bool), 0.0
    for rank, token in enumerate(order):
        if rank and (rank >= top_k or spent >= top_p * within or chances[rank] < min_p):
            break
        left[token], spent = True, spent + chances[rank]
    return left


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_by_the_sort_it_is_what_the_contract_says(way: tuple[int, float, float]) -> None:
    """Scores that are whole quarters: ties, and sums whose rounding decides nothing."""
    generator = torch.Generator().manual_seed(1)
    scores = (torch.randn(9, 300, generator=generator) * 8).round() / 4
    scores[:, 5::9] = -INF
    ours = cut(scores, cuts_of(9, way))
    for line, left in zip(scores, ours, strict=True):
        want = one_by_one(line.numpy(), way) & (line.numpy() > -INF)
        assert np.array_equal(left.numpy() > -INF, want)
        assert torch.equal(left[want], line[want])


def test_a_line_without_a_finite_best_score_keeps_its_first() -> None:
    scores = torch.zeros(4, 6)
    scores[0, [2, 4]], scores[1, [3, 5]], scores[2] = math.nan, INF, -INF
    left = cut(scores, cuts_of(4, (4, 0.9, 0.1)))
    assert left[0].isnan().nonzero().tolist() == [[2]]
    assert (left[0].isnan() | (left[0] == -INF)).all()
    assert (left[1] == INF).nonzero().tolist() == [[3]]
    assert (left[1] == -INF).sum() == 5
    assert (left[2] == -INF).all()
    assert (left[3] == torch.tensor([0.0] * 4 + [-INF] * 2)).all()


@pytest.fixture(params=SETS[2:])
def by_kernel(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    pytest.importorskip("triton", reason="triton is not installed")
    op_set(request.param)
    from ess.kernels.cuda.triton.cut import cut_into as launch

    def run(scores: torch.Tensor, cuts: Cuts, **sizes: int) -> torch.Tensor:
        out = torch.full_like(scores, 7.0, device=device())
        launch(scores.to(device()), Cuts(*(part.to(device()) for part in cuts)), out, **sizes)
        return out.cpu()

    return run


def agree(ours: torch.Tensor, scores: torch.Tensor, cuts: Cuts) -> None:
    """Bit for bit, whatever is in a NaN."""
    ours, want = ours.view(torch.int32), cut(scores, cuts).view(torch.int32)
    places = (ours != want).nonzero().tolist()
    assert not places, [(at, hex(ours[*at]), hex(want[*at])) for at in places[:9]]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_kernel_is_the_sort(by_kernel: Any, way: tuple[int, float, float]) -> None:
    """Lines that mislead a sample, with room for few candidates, for many, and for all."""
    scores = torch.from_numpy(np.stack([*test_index.hard_lists(300).values()]))
    for room, block in ((32, 64), (128, 128), (512, 512)):
        given = cuts_of(len(scores), way)
        agree(by_kernel(scores, given, room=room, block=block), scores, given)


OWN = {
    "few levels": (7, INF, 0.0),
    "equal": (1 << 31, 0.6, 0.0),
    "normal": (1 << 31, 0.9, 0.0),
    "seen": (60, 0.9, 0.05),
    "specials": (9, 0.5, 0.0),
    "tiny": (1 << 31, INF, 1.0),
}


def test_lines_with_cuts_of_their_own(by_kernel: Any) -> None:
    lists = test_index.hard_lists(300)
    scores = torch.from_numpy(np.stack([lists[name] for name in OWN]))
    given = Cuts(
        *(
            torch.cat(parts)
            for parts in zip(*(cuts_of(1, way) for way in OWN.values()), strict=True)
        )
    )
    agree(by_kernel(scores, given, room=128, block=512), scores, given)


@pytest.mark.slow
@pytest.mark.long
def test_lines_as_long_as_a_vocabulary(by_kernel: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(4, 20000, generator=generator) * torch.tensor([[1], [3], [6], [0.1]])
    given = Cuts(
        torch.tensor([50, 1 << 31, 1 << 31, 12000]),
        torch.tensor([INF, 0.9, 0.95, 0.5]),
        torch.tensor([0.0, 0.0, 1e-3, 0.0]),
    )
    agree(by_kernel(scores, given), scores, given)
