"""Linear attention in blocks of tokens, against the rule token by token in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from ess.models.families.layers.delta import BLOCK, Delta, RecurrentLayer, State
from tests.states.world import GLM5
from tests.support import checkpoints

HEADS, DIM = 2, 16


def delta(**changes: object) -> Delta:
    """Of a tiny model, or of one with other words."""
    made = (
        checkpoints.model(checkpoints.tiny_glm5_next("LI", **changes)) if changes else GLM5.model()
    )
    layer = made.layers[0]
    assert isinstance(layer, RecurrentLayer)
    return layer.delta


def drawn(own: Delta, count: int, *, fade: float) -> torch.Tensor:
    """What tokens give; of each channel is kept exp(0) to exp(-fade)."""
    noise, wide = torch.Generator().manual_seed(count), own.head_count * DIM
    given = torch.randn(3, count, 4 * wide + own.head_count, generator=noise)
    given[..., 3 * wide : 4 * wide] = -fade * torch.rand(3, count, wide, generator=noise)
    given[..., 4 * wide :] = torch.rand(3, count, own.head_count, generator=noise)
    return given


def obvious(own: Delta, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence from its beginning: what tokens read, and the matrix behind them."""
    wide, kernel = own.head_count * DIM, own._kernel.double()
    size = kernel.shape[1]
    raw = torch.cat((torch.zeros(size - 1, 3 * wide), given[:, : 3 * wide])).double()
    matrix, told = torch.zeros(own.head_count, DIM, DIM, dtype=torch.float64), []
    for at, token in enumerate(given.double()):
        summed = (raw[at : at + size] * kernel.T).sum(0)
        q, k, v = (summed * summed.sigmoid()).view(3, own.head_count, DIM)
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        fades, shares = token[3 * wide : 4 * wide].view(-1, DIM), token[4 * wide :]
        for head in range(own.head_count):
            here = matrix[head] * fades[head].exp()[:, None]
            change = shares[head] * (v[head] - here.T @ k[head])
            matrix[head] = here + torch.outer(k[head], change)
        told.append(torch.stack([matrix[h].T @ q[h] * DIM**-0.5 for h in range(own.head_count)]))
    return torch.stack(told), matrix


@pytest.mark.parametrize("fade", [0.001, 5.0, 80.0])
@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 50])
def test_a_block_does_what_its_tokens_do(count: int, fade: float) -> None:
    """Also where a channel keeps nothing, and for sequences beside one another."""
    own = delta()
    given = drawn(own, count, fade=fade)
    first = State(*(each.expand(3, *each.shape[1:]) for each in own.first()))
    told, state = own.run(given, first)
    for sequence in range(3):
        wanted, matrix = obvious(own, given[sequence])
        assert (told[sequence] - wanted).abs().max() < 1e-5
        assert (state.matrix[sequence] - matrix).abs().max() < 1e-5


@pytest.mark.parametrize("cuts", [(1,) * 40, (39, 1), (1, 39), (17, 16, 7), (3, 1, 36)], ids=str)
def test_however_tokens_are_cut(cuts: tuple[int, ...]) -> None:
    own = delta(linear_conv_kernel_dim=6)
    given, state, told = drawn(own, 40, fade=3.0), own.first(), []
    state = State(*(each.expand(3, *each.shape[1:]) for each in state))
    for stop, count in zip(itertools.accumulate(cuts), cuts, strict=True):
        read, state = own.run(given[:, stop - count : stop], state)
        told.append(read)
    for sequence in range(3):
        wanted, matrix = obvious(own, given[sequence])
        assert (torch.cat(told, 1)[sequence] - wanted).abs().max() < 1e-5
        assert (state.matrix[sequence] - matrix).abs().max() < 1e-5


def test_a_channel_may_be_of_the_token_alone() -> None:
    own = delta(linear_conv_kernel_dim=1)
    given = drawn(own, 20, fade=1.0)[:1]
    told, state = own.run(given, own.first())
    assert state.channels.shape[1] == 0
    assert (told[0] - obvious(own, given[0])[0]).abs().max() < 1e-5
