"""Stages as processes: what the server hears, and that all of them end when one does."""

from __future__ import annotations

import itertools
import os
import signal

import pytest

from ess.engine.process.lifeline import LEAVE
from ess.engine.process.messages import Abort, Add, Flush, Flushed, Handoff, Status
from ess.engine.tokens.sampling import Sampling
from tests.pd.processes import (
    PATIENCE_MS,
    SECRET,
    EngineProcess,
    adds,
    engines,
    expected,
    handed_over,
    introduce,
)
from tests.prefill.processes import PipelineProcess, pipeline
from tests.support.checkpoints import tokens
from tests.support.few import few

TEXT = tokens(1200, 512, seed=5)
ONE = Sampling(tokens_max=1)
WISH = Sampling(tokens_max=16, ignore_eos=True)
LENGTHS = (1, 2, 64, 65, 600, 1100)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def give(number: int, count: int) -> Add:
    return Add(number, TEXT[:count], ONE, handoff=Handoff(number + 1))


@pytest.mark.slow
@pytest.mark.parametrize("stage_count", few([4], all_of=[1, 2, 4]))
def test_prompts_are_made_and_every_stage_is_told_of(tmp_path, stage_count):
    with pipeline(tmp_path / "it", stage_count, chunk_tokens=128) as lead:
        ready = lead.ready()
        assert ready.metadata
        for number, count in enumerate((1, 2, 65, 600, 1100)):
            lead.say(give(number, count))
        lead.say(Add(5, TEXT[:10], ONE))
        lead.ended(*range(6))
        assert [lead.reason(number) for number in range(6)] == ["sent"] * 5 + ["refused"]
        assert "must give its rows" in lead.said[5][-1].sentence
        lead.until(lambda message: isinstance(message, Status) and bool(message.stages))
        stages = lead.status.stages
        assert [stage.rank for stage in stages] == list(range(stage_count))
        assert {stage.chunk_count for stage in stages} == {stages[0].chunk_count}
        assert stages[0].chunk_count > 10
        lead.say(Flush())
        flushed = lead.until(lambda message: isinstance(message, Flushed))
        assert "5 prompts are made" in flushed.sentence
        assert lead.stop() == 0
        assert lead.wait_all() == [0] * stage_count


@pytest.mark.slow
def test_dynamic_chunks_are_profiled_before_it_is_ready(tmp_path):
    rank = {"dynamic": True}
    with pipeline(tmp_path / "it", 2, rank=rank, chunk_tokens=256) as lead:
        lead.ready()
        lead.until(lambda message: isinstance(message, Status))
        assert lead.status.stages[1].chunk_count == 32
        lead.say(give(0, 1100))
        lead.ended(0)
        assert lead.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "lost"),
    few([(KILL, 2)], all_of=itertools.product((KILL, STOP), (1, 2, 3))),
)
def test_a_stage_that_is_lost_ends_all_and_is_named(tmp_path, lost, how):
    with pipeline(tmp_path / "it", 4, chunk_tokens=64) as lead:
        lead.ready()
        lead.say(give(0, 1100))
        lead.until(lambda message: isinstance(message, Status) and bool(message.requests))
        os.kill(lead.ranks[lost].pid, how)
        sentence = lead.fault()
        assert f"stage {lost} (layers" in sentence
        codes = lead.wait_all(but=lost if how is STOP else None)
        assert 0 not in codes


@pytest.mark.slow
@pytest.mark.parametrize("how", few([KILL], all_of=[KILL, STOP]))
def test_stages_end_with_their_lead(tmp_path, how):
    with pipeline(tmp_path / "it", 2) as lead:
        lead.ready()
        os.kill(lead.process.pid, how)
        assert lead.ranks[1].wait(timeout=PATIENCE_MS / 1000) != 0


@pytest.mark.slow
def test_stages_end_with_their_parent(tmp_path):
    with pipeline(tmp_path / "it", 2) as lead:
        lead.ready()
        lead.ranks[1].stdin.close()
        assert lead.ranks[1].wait(timeout=PATIENCE_MS / 1000) != 0
        assert "stage 1 (layers 3..5)" in lead.fault()


@pytest.mark.slow
def test_a_stage_whose_node_is_to_end_stays_while_its_lead_has_prompts(tmp_path):
    with pipeline(tmp_path / "it", 2) as lead:
        lead.ready()
        os.kill(lead.ranks[1].pid, LEAVE)
        lead.say(give(0, 65))
        lead.ended(0)
        assert lead.reason(0) == "sent"
        assert lead.stop() == 0
        assert lead.wait_all() == [0, 0]


@pytest.mark.slow
def test_a_stage_whose_node_is_to_end_does_not_wait_for_a_lead(tmp_path):
    with pipeline(tmp_path / "it", 2) as lead:
        os.kill(lead.ranks[1].pid, LEAVE)
        assert lead.ranks[1].wait(timeout=PATIENCE_MS / 1000) == -LEAVE


@pytest.mark.slow
def test_requests_are_aborted_while_they_are_on_their_way(tmp_path):
    with pipeline(tmp_path / "it", 2, chunk_tokens=64) as lead:
        lead.ready()
        for number in range(4):
            lead.say(give(number, 1100 - number))
        lead.until(lambda message: isinstance(message, Status) and bool(message.requests))
        for number in range(3):
            lead.say(Abort(number))
        lead.ended(3)
        assert lead.stop() == 0
        assert lead.wait_all() == [0, 0]


# ---- with a worker that decodes


def met(lead: PipelineProcess, decode: EngineProcess) -> int:
    theirs, ours = lead.ready().metadata, decode.ready().metadata
    return introduce(lead, decode, theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize("stage_count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_answers_of_processes_are_those_of_one(tmp_path, stage_count):
    asked = adds([TEXT[:count] for count in LENGTHS], WISH)
    single = expected(tmp_path / "alone", asked)
    with (
        engines(tmp_path, {"role": "decode", "secret": SECRET}) as [decode],
        pipeline(tmp_path / "it", stage_count, chunk_tokens=256) as lead,
    ):
        peer = met(lead, decode)
        for add in asked:
            handed_over(add, lead, decode, uid=add.number + 1, peer=peer)
        numbers = [add.number for add in asked]
        decode.ended(*numbers)
        assert [decode.tokens(number) for number in numbers] == single
        decode.until(lambda _: decode.status.handoff.landed_count == len(asked))
        assert decode.status.handoff.missed_count == 0
        lead.until(lambda _: len(lead.status.handoff.recent) == len(asked))
        assert {line.outcome for line in lead.status.handoff.recent} == {"sent"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "how"),
    few([(1, STOP)], all_of=itertools.product((0, 1), (KILL, STOP))),
)
def test_a_lost_stage_costs_time_and_no_answer(tmp_path, lost, how):
    """What did not come is made by the worker that decodes, all of it."""
    asked = adds([TEXT[:1100], TEXT[50:1150]], WISH)
    single = expected(tmp_path / "alone", asked)
    waits = {"handoff_wait_s": 2.0}
    with (
        engines(tmp_path, {"role": "decode", **waits}) as [decode],
        pipeline(tmp_path / "it", 2, chunk_tokens=64) as lead,
    ):
        peer = met(lead, decode)
        for add in asked:
            handed_over(add, lead, decode, uid=add.number + 1, peer=peer)
        lead.until(lambda message: isinstance(message, Status) and bool(message.requests))
        os.kill(lead.ranks[lost].pid, how)
        decode.ended(0, 1)
        assert [decode.tokens(number) for number in (0, 1)] == single
        assert decode.status.mismatch_count == 0
