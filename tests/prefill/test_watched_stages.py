"""Stages of two ranks each, as the lead watches them: made-up reports, beats and losses."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from ess.comm.group import Beat
from ess.comm.link import LinkLost
from ess.prefill import orders, reports
from ess.prefill.orders import Forget
from ess.prefill.reports import Free, Took
from ess.prefill.stages import StageLost, Stages

LAYERS = [(0, 2), (2, 3), (3, 4)]
TEAM = 2
TIMEOUT_S = 60.0
FREE = Free(1, 2, 3, 4)


class MadeUpLink:
    """Takes all that is sent, and gives what `frames` has; an error is raised."""

    def __init__(self):
        self.frames, self.sent = deque(), []

    def send(self, head, tensor):
        self.sent.append(head)

    def receive(self, timeout_s):
        frame = self.frames.popleft() if self.frames else None
        if isinstance(frame, LinkLost):
            raise frame
        return None if frame is None else SimpleNamespace(head=frame, tensor=None)


class MadeUpGroup:
    def __init__(self):
        self.size, self.next = TEAM * len(LAYERS), MadeUpLink()
        self.reports = {rank: MadeUpLink() for rank in range(1, self.size)}
        self.still_s = dict.fromkeys(self.reports, 0.0)
        self.advance_count = 0

    def advance(self):
        self.advance_count += 1

    def beats(self):
        return {rank: Beat(0, float(rank), still_s) for rank, still_s in self.still_s.items()}

    def hear(self, stage, *said):
        self.reports[stage * TEAM].frames.append(reports.pack(said))


@pytest.fixture
def group():
    return MadeUpGroup()


@pytest.fixture
def stages(group):
    return Stages(group, LAYERS, timeout_s=TIMEOUT_S, free=lambda: FREE)


def ordered(stages, count=1):
    """This many frames, obeyed by the first stage and sent."""
    for _ in range(count):
        stages.order(Forget())
        stages.flush()


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_a_rank_that_stands_still_with_orders_is_named_by_its_stage(group, stages, rank):
    group.still_s[rank] = TIMEOUT_S + 1
    stages.listen()
    ordered(stages)
    with pytest.raises(StageLost, match=r"stands still for 61\.0 s, at most 60") as lost:
        stages.listen()
    assert str(lost.value).startswith(stages.name(rank // TEAM))


def test_ranks_that_have_obeyed_all_or_are_not_too_late_are_not_lost(group, stages):
    """Nor is a rank of the lead's own stage, whose orders have no reports."""
    ordered(stages)
    group.still_s |= {1: TIMEOUT_S + 1, 2: TIMEOUT_S + 1, 3: TIMEOUT_S + 1, 4: TIMEOUT_S}
    group.hear(1, Took(1, FREE))
    stages.listen()
    stages.check()


def test_silences_are_those_of_first_ranks(stages):
    assert stages.silences() == (0.0, 2.0, 4.0)


@pytest.mark.parametrize(("rank", "stage"), [(-1, 0), (1, 0), (2, 1), (5, 2)])
def test_a_lost_rank_is_named_by_its_stage(group, stages, rank, stage):
    group.reports[4].frames.append(LinkLost(rank, "the power failed"))
    with pytest.raises(StageLost) as lost:
        stages.listen()
    assert str(lost.value) == f"{stages.name(stage)}: the power failed"


@pytest.mark.parametrize("frame", [0, 2])
def test_frames_are_obeyed_in_order(group, stages, frame):
    ordered(stages, 2)
    group.hear(1, Took(frame, FREE))
    with pytest.raises(StageLost, match=rf"has obeyed frame {frame}, where 1 is next of 2 sent"):
        stages.listen()


@pytest.mark.parametrize("sent_count", [0, 1])
def test_a_frame_that_was_not_sent_is_not_obeyed(group, stages, sent_count):
    ordered(stages, sent_count)
    group.hear(2, *(Took(at + 1, FREE) for at in range(sent_count + 1)))
    with pytest.raises(StageLost, match=rf"where {sent_count + 1} is next of {sent_count} sent"):
        stages.listen()


@pytest.mark.parametrize(("ahead", "late"), [(1, 2), (2, 1)])
def test_each_frame_is_kept_until_all_stages_have_obeyed_it(group, stages, ahead, late):
    """What is free differs behind each frame. Reports of a later stage may come first."""
    behind = [Free(at, 2, 3, 4) for at in range(3)]
    for free in behind:
        stages._free = lambda free=free: free
        ordered(stages)
    group.hear(ahead, *(Took(at + 1, free) for at, free in enumerate(behind)))
    for at, free in enumerate(behind):
        stages.listen()
        stages.check()
        group.hear(late, Took(at + 1, free))
    stages.listen()
    stages.check()
    stages.finish()
    assert not stages._expected


@pytest.mark.parametrize("is_obeyed", [True, False])
def test_another_count_behind_a_frame_names_both(group, stages, is_obeyed):
    stages.order(Forget(), is_obeyed=is_obeyed)
    stages.flush()
    other = Free(9, 2, 3, 4)
    group.hear(2, Took(1, other))
    if not is_obeyed:
        stages.listen()
    with pytest.raises(StageLost) as lost:
        stages.listen() if is_obeyed else stages.obeyed()
    assert str(lost.value) == (
        f"{stages.name(2)} disagrees: behind frame 1 it has {other}, {stages.name(0)} {FREE}"
    )


def test_the_end_waits_for_all_frames_and_says_meanwhile_that_the_lead_runs(group, stages):
    """Orders that wait for room are sent while it waits; the lead's beats go on."""
    for at in range(4):
        stages.order(Forget())
        if at < 3:
            stages.flush()
    for stage in (1, 2):
        group.hear(stage, *(Took(at + 1, FREE) for at in range(3)))
        group.hear(stage, Took(4, FREE))
    stages.finish()
    assert len(group.next.sent) == 4
    assert orders.unpack(group.next.sent[3]) == [Forget()]
    assert group.advance_count > 0


def test_the_end_waits_for_no_stage_that_stands_still(group, stages):
    """The word of the other stage is heard before."""
    ordered(stages)
    group.hear(1, Took(1, FREE))
    group.still_s[5] = TIMEOUT_S + 1
    with pytest.raises(StageLost, match=r"stage 2 \(layers 3\.\.3\) has orders and stands still"):
        stages.finish()
    assert stages._taken == [0, 1, 0]
