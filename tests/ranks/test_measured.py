"""What `ess-bench comm` holds volumes against, and that it runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from ess.bench.ranks.exchange import comm_benchmark, even_bytes
from ess.bench.ranks.line import LateTeam, Line
from ess.comm.experts.expert_ranks import ExpertRanks
from ess.comm.experts.placement import even
from ess.comm.local import local_group
from tests.comm.test_expert_ranks import EXPERTS, PER_TOKEN, in_blocks, through
from tests.comm.test_local import each


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_formula_is_the_mean_over_all_choices_of_experts(ranks):
    """Every choice of a token's experts, among ranks of which rank 0 has all tokens: a line is
    bfloat16 there as here, and what comes back is as wide as what went out."""
    choices = torch.tensor(list(itertools.combinations(range(EXPERTS), PER_TOKEN)))
    line = Line(latency_s=0.0, bytes_per_s=1e12)

    def act(group) -> ExpertRanks:
        expert_ranks = ExpertRanks(LateTeam(group.team, line), even(EXPERTS, ranks))
        asked = choices if group.rank == 0 else choices[:0]
        given = torch.zeros((len(asked), 7), dtype=torch.bfloat16)
        through(expert_ranks, given, asked, in_blocks(expert_ranks.places.usual, 1))
        return expert_ranks

    by_rank = each(local_group(ranks, team=ranks), act)
    config = SimpleNamespace(expert_count=EXPERTS, experts_per_token=PER_TOKEN, hidden_dim=7)
    out, _ = even_bytes(config, ranks)
    config.hidden_dim = 8
    _, back = even_bytes(config, ranks)
    assert by_rank[0].traffic.out_bytes == pytest.approx(out * len(choices))
    assert sum(each.traffic.back_bytes for each in by_rank) == pytest.approx(back * len(choices))


@pytest.mark.slow
def test_the_benchmark_runs_in_small():
    rows = comm_benchmark(smoke=True)
    kinds = [row.name.partition(":")[0] for row in rows]
    wanted = ["volume"] * 6 + ["balance"] * 2 + ["exposed"] * 2
    assert kinds == [*wanted, "host pool of a stage"]
    assert all(row.value > 0 for row in rows)
    assert [row.ratio for row in rows[:4]] == [1.0] * 4, "a formula is not what was sent"
    assert rows[-1].ratio == pytest.approx(2, rel=0.02)
    assert (rows[-1].config["files"], rows[-1].config["writers"]) == (1, 1)
