"""Index logits of queries that share keys, and lists that programs share. On a GPU or interpreted.

Small whole numbers make every sum exact, so that equal bits are asked of the interpreter too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels.ops import Ops
from ess.layout import IndexCodec
from tests.kernels import test_index
from tests.kernels.sets import SETS, op_set, reference
from tests.kernels.test_triton_ops import device

pytest.importorskip("triton", reason="triton is not installed")

CODEC = IndexCodec(key_dim=16, head_count=3)


@pytest.fixture(params=SETS[2:])
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


def whole(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("each", [2, 3, 4, 6])
def test_queries_that_share_keys_get_what_one_gets_alone(ops: Ops, each: int) -> None:
    """Lengths differ within a request, one is empty, the table of others is never read, and nothing
    is written behind a length."""
    from ess.kernels.cuda.triton.index import logits_into

    page_count, pages_each = 40, 18
    pages = torch.zeros(page_count, CODEC.page_bytes, dtype=torch.uint8)
    keys = reference.encode_keys(whole(page_count * 64, 16, seed=1), CODEC)
    reference.write_keys(pages, torch.arange(page_count * 64), keys, CODEC)
    queries = whole(2 * each, 3, 16, seed=2).bfloat16()
    weights = whole(2 * each, 3, seed=3)
    table = torch.stack([torch.randperm(page_count)[:pages_each] for _ in range(2)]).int()
    table = table.repeat_interleave(each, 0).contiguous()
    lengths = torch.arange(2 * each, dtype=torch.int32) + 300
    lengths[each:] = 1100
    lengths[1] = 0
    exact = reference.index_logits(queries, weights, pages, table, lengths, CODEC)
    given = queries, weights, pages, table, lengths
    chosen = ops.index_top_k(*given, CODEC, k=60, queries_per_request=each)
    assert torch.equal(chosen, reference.top_k(exact, lengths, k=60))
    there = [tensor.to(device()) for tensor in given]
    want = torch.full((2 * each, pages_each * 64), 7.0, device=device())
    ours = want.clone()
    logits_into(*there, CODEC, out=want)
    if each < 6:
        there[3][:each][: each - 1] = 10**6
    logits_into(*there, CODEC, out=ours, queries_per_request=each)
    assert torch.equal(ours, want)
    assert torch.equal(ours.cpu(), exact.where(exact > -torch.inf, 7.0))
    for refusing in (ops, reference):
        with pytest.raises(BadInput, match=f"{2 * each} queries are not 5 of each request"):
            refusing.index_top_k(*given, CODEC, k=60, queries_per_request=5)


def lists_of(count: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What could mislead a search by bytes, and every length beside k."""
    lists = test_index.hard_lists(count)
    logits = np.stack([*lists.values(), *[lists["near"]] * 6])
    lengths = [count] * len(lists) + [0, 1, k - 1, k, k + 1, count // 2]
    return torch.from_numpy(logits), torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("k", [1, 7, 2048])
def test_lists_shared_among_programs_are_searched_exactly(ops: Ops, k: int) -> None:
    """Three chunks, of which the last is partly filled; ties go over the edges of chunks."""
    from ess.kernels.cuda.triton.index import top_k_into

    logits, lengths = lists_of(9000, k)
    out = torch.full((len(logits), k), 7, dtype=torch.int32, device=device())
    top_k_into(logits.to(device()), lengths.to(device()), out=out, spreads=True)
    for row, length, ours in zip(logits.numpy(), lengths.tolist(), out.cpu().numpy(), strict=True):
        want = test_index.greatest(row[:length], k)
        assert np.array_equal(ours[: len(want)], want), (length, k)
        assert (ours[len(want) :] == -1).all()


def test_shared_lists_are_those_of_one_program(ops: Ops) -> None:
    from ess.kernels.cuda.triton.index import top_k_into

    logits = torch.randn(3, 4160, generator=torch.Generator().manual_seed(3)).round()
    lengths = torch.tensor([4160, 4099, 7], dtype=torch.int32)
    for spreads in (False, True):
        out = torch.full((3, 50), 7, dtype=torch.int32, device=device())
        top_k_into(logits.to(device()), lengths.to(device()), out=out, spreads=spreads)
        assert torch.equal(out.cpu(), reference.top_k(logits, lengths, k=50))
