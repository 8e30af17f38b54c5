"""What is shared on a device gives the bits that it gives alone."""

from __future__ import annotations

import pytest
import torch

from ess.layout import IndexCodec
from ess.units import PAGE_ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

KEYS = IndexCodec()


@pytest.mark.parametrize("each", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_logits_of_queries_that_share_keys_are_bitwise_those_alone(
    dtype: torch.dtype, each: int
) -> None:
    from ess.kernels.cuda.triton.index import logits_into

    width, count = 70, 3 * each
    pages = torch.randint(0, 0x7E, (3 * width, KEYS.page_bytes), dtype=torch.uint8, device="cuda")
    pages[:, PAGE_ROWS * KEYS.key_dim :].view(torch.float32).fill_(2.0**-8)
    table = torch.randperm(3 * width, device="cuda").int().view(3, width)
    table = table.repeat_interleave(each, 0).contiguous()
    lengths = torch.randint(1, width * PAGE_ROWS, (count,), device="cuda").int()
    queries = torch.randn(count, KEYS.head_count, KEYS.key_dim, device="cuda").to(dtype)
    weights = torch.randn(count, KEYS.head_count, device="cuda")
    outs = [torch.full((count, width * PAGE_ROWS), -7.0, device="cuda") for _ in range(2)]
    for out, shared in zip(outs, (1, each), strict=True):
        logits_into(
            queries, weights, pages, table, lengths, KEYS, out=out, queries_per_request=shared
        )
    assert torch.equal(*(out.view(torch.int32) for out in outs))


@pytest.mark.parametrize("levels", [3, 1 << 20])
def test_top_k_shared_among_programs_is_that_of_one_in_a_replayed_graph(levels: int) -> None:
    from ess.kernels.cuda.triton.index import top_k_into

    logits = torch.zeros(3, 131_072, device="cuda")
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    ours, want = (torch.empty(3, 2048, dtype=torch.int32, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    top_k_into(logits, lengths, out=ours, spreads=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        top_k_into(logits, lengths, out=ours, spreads=True)
    for _ in range(20):
        logits.copy_(torch.randint(levels, logits.shape, device="cuda"))
        lengths.copy_(torch.randint(131_073, (3,)))
        graph.replay()
        top_k_into(logits, lengths, out=want, spreads=False)
        assert torch.equal(ours, want)
