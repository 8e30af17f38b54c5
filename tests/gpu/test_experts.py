"""Products of experts in a captured graph, over counts that change between replays."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import test_grouped
from tests.kernels.sets import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

ROOM = 40
REPLAYS = 100


def test_replays_follow_the_counts() -> None:
    """From all to one expert to none at all; what lies behind the last end is left alone."""
    from ess.kernels import backend

    case = test_grouped.make([ROOM, 0, 0], torch.bfloat16, test_grouped.FP8, behind=0)
    there = {name: each.cuda() for name, each in case._asdict().items() if each is not None}
    ops = backend.ops("cuda")
    ops.expert_products(**there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.expert_products(**there)
    generator = torch.Generator().manual_seed(0)
    for turn in range(REPLAYS):
        ends = torch.randint(0, ROOM + 1, (3,), generator=generator).sort().values.int()
        ends = (torch.zeros(3).int(), ends)[turn > 0]
        there["ends"].copy_(ends.pin_memory())
        there["out"].fill_(test_grouped.POISON)
        graph.replay()
        now = case._replace(ends=ends, out=torch.full_like(case.out, test_grouped.POISON))
        close(there["out"].cpu(), now)


def close(ours: torch.Tensor, case: test_grouped.Case) -> None:
    test_grouped.close(ours, case.run(reference).double().numpy(), case)
