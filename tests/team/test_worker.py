"""A prefill worker whose stages are teams, as processes."""

from __future__ import annotations

import signal

import pytest

from ess.engine.process.messages import Status
from tests.prefill.processes import CUTS, pipeline
from tests.prefill.test_processes import give
from tests.support.few import few


def teams(kind: str) -> dict[str, object]:
    cuts = CUTS[2]
    return {"size": 4, "team": 2, "team_kind": kind, "layers": ((0, cuts[1]), (cuts[1], cuts[2]))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_two_stages_of_two_ranks_make_prompts_and_end_in_order(tmp_path, kind):
    with pipeline(tmp_path / "it", 4, rank=teams(kind), chunk_tokens=128) as lead:
        lead.ready()
        for number, count in enumerate((1, 2, 65, 600)):
            lead.say(give(number, count))
        lead.ended(*range(4))
        assert [lead.reason(number) for number in range(4)] == ["sent"] * 4
        lead.until(lambda message: isinstance(message, Status) and len(message.stages) == 2)
        assert lead.stop() == 0
        assert lead.wait_all() == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize("lost", few([3], all_of=[1, 3]))
def test_a_member_that_is_lost_ends_all_and_its_stage_is_named(tmp_path, lost):
    with pipeline(tmp_path / "it", 4, rank=teams("cp"), chunk_tokens=64) as lead:
        lead.ready()
        lead.say(give(0, 1100))
        lead.until(lambda message: isinstance(message, Status) and bool(message.requests))
        lead.ranks[lost].send_signal(signal.SIGKILL)
        assert f"stage {lost // 2}" in lead.fault()
        assert 0 not in lead.wait_all()
