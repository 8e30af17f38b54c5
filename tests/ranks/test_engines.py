"""Engines that divide the experts give the tokens of the plain model: whatever each has to do."""

from __future__ import annotations

import itertools

import pytest

from ess.comm.experts.expert_ranks import Rooms
from ess.engine.ranks.agreement import StepAgreement, StepNeeds, agreed
from ess.engine.step.tuning import Tuning
from tests.model.test_engine import expected
from tests.ranks.rig import EXPERTS, Rank, Task, run_ranks
from tests.support.few import few

BUSY = (Task(0, 130, 8), Task(0, 2, 8), Task(0, 90, 8), Task(7, 110, 4))
LATE = (Task(4, 64, 9), Task(7, 1, 5), Task(7, 33, 5, cancelled=2))
BRIEF = (Task(2, 70, 3),)
"""And a rank with no tasks at all, which only stands by."""


def check(family: str, ranks: list[Rank]) -> None:
    for rank in ranks:
        for task, request in rank.made:
            wanted = expected(family, task.length, task.count)
            if task.cancelled is None:
                assert request.output == wanted, task
            else:
                assert request.reason == "cancelled"
                assert request.output == wanted[: len(request.output)], task


CASES = [
    # family, ranks, mode, mtp, tbo, sbo
    ("v32", 2, "da", 1, "off", "off"),
    ("v32", 4, "layerwise", 4, "on", "combine-down"),
    ("glm", 2, "resident", 2, "on", "dispatch-shared"),
]


@pytest.mark.parametrize(("family", "size", "mode", "mtp", "tbo", "sbo"), CASES)
def test_ranks_give_the_plain_model_s_tokens(family, size, mode, mtp, tbo, sbo):
    tasks = [BUSY, LATE, (), BRIEF][:size]
    ranks = run_ranks(family, tasks, modes=mode, mtp=mtp, tbo=tbo, sbo=sbo)
    check(family, ranks)
    assert len({rank.expert_ranks.traffic.exchange_count for rank in ranks}) == 1
    assert ranks[0].expert_ranks.traffic.out_bytes > 0
    assert ranks[1].stood_by > 0
    if tbo == "on":
        assert ranks[0].engine.tuning.split_count > 2


GRID = [
    (*case, ("v32", "glm")[at % 2], ("none", "da", "dba", "resident", "layerwise")[at % 5])
    for at, case in enumerate(
        itertools.product(
            (2, 4),
            (1, 2, 4),
            ("off", "on"),
            ("off", "combine-down", "combine-shared", "dispatch-shared"),
        )
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "mtp", "tbo", "sbo", "family", "mode"), few(GRID[14::7], all_of=GRID)
)
def test_every_order_on_two_ranks_and_on_four(size, mtp, tbo, sbo, family, mode):
    tasks = [LATE, BUSY, BRIEF, ()][:size]
    check(family, run_ranks(family, tasks, modes=mode, mtp=mtp, tbo=tbo, sbo=sbo))


FIXED = [case for case in GRID if case[3] != "combine-down"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "mtp", "tbo", "sbo", "family", "mode"), few(FIXED[4::8], all_of=FIXED)
)
def test_exchanges_of_agreed_sizes_change_no_token(size, mtp, tbo, sbo, family, mode):
    """As devices have them, by engines of the host: a rank of four has nothing to do."""
    tasks = [LATE, BUSY, (), BRIEF][:size]
    more = {"depth": 1} if mtp == 2 else {}
    ranks = run_ranks(family, tasks, is_fixed=True, modes=mode, mtp=mtp, tbo=tbo, sbo=sbo, **more)
    check(family, ranks)
    assert len({rank.expert_ranks.traffic.exchange_count for rank in ranks}) == 1
    loads = [rank.expert_ranks.loads.recent() for rank in ranks]
    assert loads[0] == loads[-1]
    tokens = sum(rank.expert_ranks.traffic.token_count for rank in ranks)
    assert sum(map(sum, loads[0].values())) == 2 * tokens > 0


def test_a_rank_has_its_own_experts_and_no_others():
    ranks = run_ranks("v32", [BRIEF, ()], modes="none")
    for rank in ranks:
        layer = rank.engine.runner.model.layers[1]
        assert layer.experts.own_count == EXPERTS // 2
        assert len(layer.experts._down[0]) == EXPERTS // 2
    assert [rank.expert_ranks.own(1) for rank in ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_preempted_requests_go_on_while_others_run():
    tasks = [(Task(0, 130, 9, preempted=3), Task(0, 64, 9)), (Task(3, 90, 9, preempted=4),)]
    ranks = run_ranks("v32", tasks, modes="da", mtp=2, tbo="on")
    check("v32", ranks)
    assert [rank.engine.preempted_count for rank in ranks] == [1, 1]


def test_pages_that_run_short_on_one_rank_do_not_disturb_the_other():
    """Each request needs a page at first and two at its end; the device has four."""
    tasks = [tuple(Task(0, length, 20) for length in (50, 60, 62)), (Task(2, 40, 3),)]
    ranks = run_ranks("v32", tasks, modes="da", promise="some", index_pages=4, chunks=2)
    check("v32", ranks)
    assert ranks[0].engine.preempted_count > 0


def test_steps_launched_ahead_stay_in_step():
    check("v32", run_ranks("v32", [BUSY, LATE], modes="da", mtp=2, depth=1))


def test_one_step_of_accord():
    """A step as it may be: two decode, one has a chunk, one has nothing."""
    needs = [
        StepNeeds(token_count=6, half_count=4, draft_count=2, splits=True),
        StepNeeds(token_count=2, half_count=2, chunk_tokens=48, draft_count=1),
        StepNeeds(leaves=True),
    ]
    made = agreed(needs)
    rooms = Rooms(batch=6, half=4, chunk=48)
    assert made == StepAgreement(rooms=rooms, draft_count=1, splits=True, all_leave=False)
    assert made == agreed(needs[::-1])
    assert agreed([needs[1], needs[2]]).splits is False
    assert agreed([StepNeeds(), needs[2]]).is_quiet
    assert agreed([needs[2]] * 2).all_leave


def test_what_the_ranks_agreed_on_is_what_the_step_reports():
    """Rank 1 has one request, which has no second half; the other's batch splits, so it does."""
    ranks = run_ranks("v32", [BUSY, (Task(0, 90, 12),)], modes="none", tbo="on")
    counts = [rank.engine.tuning.split_count for rank in ranks]
    assert min(counts) > 2
    assert isinstance(ranks[1].engine.tuning, Tuning)
    ranks[1].engine.tuning.check()
