"""Products of experts that are made before there are requests: of how many lines, and where the
lines of each expert end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ess.models.weights import ahead
from ess.models.weights.kept import Fp8Weight
from tests.support.manual_clock import ManualClock


class Made:
    """A model with experts alone, whose weights are not on the CPU."""

    __module__ = "ess.models.model"
    config = SimpleNamespace(experts_per_token=3)

    def __init__(self, rank_count: int | None) -> None:
        team = SimpleNamespace(size=rank_count)
        self.expert_ranks = None if rank_count is None else SimpleNamespace(team=team)
        values = SimpleNamespace(is_cpu=False, shape=(5, 128, 256), dim=lambda: 3, device="cpu")
        self.experts = [Fp8Weight(values, None), Fp8Weight(values, None)]


@pytest.mark.parametrize(("rank_count", "most"), [(None, 24), (4, 96)])
def test_experts_get_lines_from_every_rank(monkeypatch, rank_count, most):
    made, told = [], []

    def products(given, ends, values, *, scales, out):
        assert (given.shape[1], out.shape) == (values.shape[2], (len(given), values.shape[1]))
        made.append(ends.tolist())

    built = SimpleNamespace(counts_to_build=lambda values, most: [7, 20, most])
    ours = SimpleNamespace(backend=built, expert_products=products)
    monkeypatch.setattr(ahead, "ops", lambda _: ours)
    ahead.build_ahead(Made(rank_count), count_max=8, clock=ManualClock(), tell=told.append)
    assert told == [f"products in fp8: 5 x 128 x 256 by up to {most} lines, shape 1 of 1, 0.0 s"]
    assert made == [[count * n // 5 for n in range(1, 6)] for count in (most, 20, 7)]
