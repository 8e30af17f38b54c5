"""Who writes and who reads, and what a team refuses."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from ess.clock import RealClock
from ess.comm.group import Group
from ess.comm.local import local_group
from ess.comm.team import OneTeam
from ess.door import Offload
from ess.door.memory.mapped import MappedPools, MappedRows, SharedPools
from ess.engine.prompt.pack import Span
from ess.engine.prompt.share import Whole, cut
from ess.engine.step.runner import Runner
from ess.engine.tokens.determinism import check_heads
from ess.errors import BadInput, Unavailable
from ess.models.load import load_model
from ess.models.weights.expected.shapes import Cut, Spec
from ess.models.weights.expected.split import Split
from ess.prefill.team import OwnRows, TeamLead, heads_of, share_of
from tests.support.layouts import PLAIN
from tests.team.rig import Made, alone, in_team, packs, prompts, run_packs
from tests.team.test_exact import check_bitwise

LENGTHS = (66,)


class Early:
    """A member that is always at a barrier before member 0 has written."""

    def __init__(self, team, came: threading.Semaphore) -> None:
        self._team = team
        self._came = came
        self.rank, self.size = team.rank, team.size
        self.all_gather, self.all_to_all = team.all_gather, team.all_to_all
        self.broadcast = team.broadcast

    def barrier(self) -> None:
        if self.rank:
            self._came.release()
        self._team.barrier()


@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_no_rank_reads_a_layer_before_all_have_written_it(kind, monkeypatch):
    """Member 0, whose tokens come first, writes its rows when the other one is done with its own.
    The pools are poisoned: a row that is read too early is no number."""
    came = threading.Semaphore(0)

    def late(self: OwnRows, layer: int, start: int, rows: object) -> None:
        assert came.acquire(timeout=30)
        MappedRows.import_rows(self, layer, start, rows)

    monkeypatch.setattr(OwnRows, "import_rows", late)
    monkeypatch.setattr(
        "ess.prefill.team.share_of", lambda kind, team: share_of(kind, Early(team, came))
    )

    def lead(runner: Runner, group: Group) -> list[Made]:
        head = TeamLead(runner, group.team, kind, RealClock())
        with runner.offload, torch.inference_mode():
            texts, listed = prompts(LENGTHS), packs(LENGTHS, 128)
            made = run_packs(runner.offload, lambda s: head.queue_part(s).made(), texts, listed)
            head.stop()
            return made

    check_bitwise(in_team(lead, kind, 2, "v32", "f32"), alone("v32", "f32", LENGTHS, 128))


def test_tokens_are_cut_into_slices_that_no_two_ranks_share():
    for lengths in ([1], [2, 1, 5], [64, 64], [7]):
        spans = [
            Span(sequence=object(), start=3, tokens=[*range(n)], following=[*range(1, n + 1)])
            for n in lengths
        ]
        for size in (1, 2, 3, 8):
            runs = [cut(spans, rank, size) for rank in range(size)]
            for at, span in enumerate(spans):
                parts = [p for got, _ in runs for p in got if p.sequence is span.sequence]
                assert [t for p in parts for t in p.tokens] == span.tokens
                assert [t for p in parts for t in p.following] == span.following
                assert all(p.stop + p.behind_count == span.stop for p in parts)
                assert sum(own[at].stop - own[at].start for _, own in runs) == len(span.tokens)
            sizes = [sum(len(p.tokens) for p in got) for got, _ in runs]
            assert max(sizes) - min(sizes) <= 1


def test_a_team_of_one_shares_nothing():
    assert isinstance(share_of("tp", OneTeam()), Whole)
    assert heads_of("tp", OneTeam()) is None
    assert heads_of("cp", local_group(2, team=2)[1].team) is None


def test_heads_that_cannot_be_split_are_refused_by_name():
    with pytest.raises(BadInput, match=r"q_b_proj.*4 parts.*3 tensor-parallel ranks"):
        load_model(heads=Split(tp=3, by_heads=True))
    spec = Spec(
        name="q_b_proj.weight", shape=(768, 128), role="linear", cut=Cut(dim=0, part_count=4)
    )
    with pytest.raises(BadInput, match=r"q_b_proj.*slices of 192.*128-wide quantisation block"):
        Split(tp=4, by_heads=True).window(spec, blocked=True)
    whole = Spec(name="o_proj.weight", shape=(64, 768), role="linear", cut=Cut(dim=1, part_count=4))
    assert Split(tp=4, by_heads=True).window(whole, blocked=True) is None


@pytest.mark.parametrize(
    ("heads", "size", "said"),
    [
        (12, 5, "tp_size is 5: 12 heads cannot be shared equally"),
        (64, 8, "8 of 64 heads"),
        (8, 2, "4 of 8 heads"),
    ],
)
def test_teams_that_a_deterministic_engine_refuses(heads, size, said):
    with pytest.raises(BadInput, match=said):
        check_heads(size, head_count=heads, deterministic=True)


@pytest.mark.parametrize(("heads", "size"), [(128, 8), (4, 2), (8, 1)])
def test_teams_that_keep_every_bit(heads, size):
    check_heads(size, head_count=heads, deterministic=True)
    check_heads(8, head_count=64, deterministic=False)


def offload(**more) -> Offload:
    return Offload.create(PLAIN, slot_bytes="8MB", host_bytes="8MB", length_max=512, **more)


def test_only_shared_pools_of_the_same_layout_are_mapped():
    with offload() as private, pytest.raises(BadInput, match="not in shared memory"):
        SharedPools.of(private.owner.pools)
    with offload(shared=True) as pools:
        shared = SharedPools.unpack(SharedPools.of(pools.owner.pools).pack())
        assert MappedPools.map(PLAIN, shared).host_page_count == shared.host_pages
        with pytest.raises(BadInput, match="load the same part"):
            MappedPools.map(PLAIN.part(0, 1), shared)
        with pytest.raises(BadInput, match="bytes, not 3"):
            SharedPools.unpack(b"abc")
    del pools
    with pytest.raises(Unavailable, match="cannot be mapped"):
        MappedPools.map(PLAIN, shared)


def test_pages_outside_of_the_pools_are_refused():
    with offload(shared=True) as pools:
        mapped = MappedPools.of(pools.owner.pools)
        good = np.zeros(1, np.int32)
        for bad in (good - 1, good + mapped.host_page_count):
            with pytest.raises(BadInput, match="host pages"):
                MappedRows(mapped, bad, good)
        with pytest.raises(BadInput, match="active pages"):
            MappedRows(mapped, good, good + mapped.index_page_count)
