"""What becomes of requests in a pipeline: admission, cancels, prefixes, endings."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import product

import pytest

from ess.door.handoff.endings import Lapsed, Sent
from ess.errors import BadInput, BadState
from ess.prefill import openings, orders
from ess.prefill.batches import WINDOW_S, Batches
from ess.prefill.orders import Close, GiveUp, Open, Part, Run
from ess.prefill.stage import Disagreement
from ess.prefill.stages import StageLost
from ess.transfer.messages import Reason
from tests.prefill.pipes import CHUNK, Pipe, engine_given, pools, text
from tests.support.few import few


def assert_quiet(pipe: Pipe) -> None:
    """Nothing is open anywhere, and all stages are alike."""
    pipe.settle()
    assert len(pipe.lead._prompts) == 0
    first, *others = map(pools, pipe.stages)
    assert all(other == first for other in others)
    assert first["held"] == [0] * len(first["held"])
    assert first["active"] == [0] * len(first["active"])


@pytest.mark.parametrize("give", [None, -1, 1 << 63])
def test_a_request_must_give_its_rows(give):
    with pytest.raises(BadInput, match=r"must give its rows|must be 0 to"):
        Pipe(2).lead.add(text(10), give=give)


def test_a_prompt_that_never_fits_is_refused_and_the_next_one_runs():
    pipe = Pipe(2, page_count=4)
    refused, runs = pipe.add(text(700)), pipe.add(text(200))
    pipe.run()
    assert refused.reason == "refused"
    assert "needs 11 index pages" in str(refused.refusal)
    assert runs.reason == "sent"
    pipe.release_all()
    assert_quiet(pipe)


def test_a_prompt_waits_for_room_until_every_stage_has_let_go_of_another():
    pipe = Pipe(2, page_count=6)
    first, second = pipe.add(text(300)), pipe.add(text(301))
    pipe.run(until=lambda: first.reason is not None)
    pipe.settle()
    assert second.state == "waiting"
    assert pipe.lead.refusal.limiter == "host pages"
    pipe.release(1, stages=[0])
    pipe.settle()
    assert second.state == "waiting", "the other stage still reads"
    pipe.release(1, stages=[1])
    pipe.run()
    assert second.reason == "sent"
    pipe.release_all()
    assert_quiet(pipe)


def test_a_prompt_waits_while_as_many_are_open_as_may_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openings, "OPEN_MAX", 1)
    pipe = Pipe(2)
    first, second = pipe.add(text(90)), pipe.add(text(91))
    pipe.run(until=lambda: first.reason is not None)
    pipe.settle()
    assert second.state == "waiting"
    assert pipe.lead.refusal.limiter == "handoffs"
    pipe.release(1)
    pipe.run()
    assert second.reason == "sent"


def test_more_prompts_than_sequences_come_one_after_another(monkeypatch: pytest.MonkeyPatch):
    """Each prompt takes three orders to come to the second stage."""
    monkeypatch.setattr(orders, "TEXT_MAX", 40)
    pipe = Pipe(2, sequence_max=2)
    requests = [pipe.add(text(90, seed=seed)) for seed in range(5)]
    pipe.run()
    assert [request.reason for request in requests] == ["sent"] * 5


@pytest.mark.parametrize(
    ("length", "moment"),
    few(
        [(65 if moment % 4 else 300, moment) for moment in range(0, 14, 2)],
        all_of=product([300, 65], range(14)),
    ),
)
def test_a_request_is_cancelled_at_any_moment(moment, length):
    pipe = Pipe(3)
    other = pipe.add(text(200))
    request = pipe.add(text(length, seed=3))
    for at in range(moment):
        pipe.turns[at % len(pipe.turns)]()
    pipe.lead.cancel(request)
    reason = request.reason
    pipe.lead.cancel(request)
    assert request.reason == reason
    assert reason in ("cancelled", "sent")
    pipe.run()
    assert other.reason == "sent"
    assert pipe.given(1).rows == engine_given([text(200)])[0].rows
    pipe.settle()
    pipe.release_all()
    assert_quiet(pipe)


def test_a_cancelled_prompt_that_was_on_its_way_ends_its_handoff_everywhere():
    pipe = Pipe(2)
    request = pipe.add(text(100))
    pipe.lead.step()
    pipe.lead.cancel(request)
    assert_quiet(pipe)
    [ended] = pipe.lead.ended_handoffs
    assert isinstance(ended, Lapsed)
    assert ended.reason is Reason.ABORTED
    assert "stage 0" in ended.sentence


def test_a_handoff_that_one_stage_did_not_send_has_lapsed():
    pipe = Pipe(2)
    pipe.add(text(100))
    pipe.add(text(101))
    pipe.run()
    pipe.release(1)
    pipe.release(2, stages=[0])
    pipe.release(2, stages=[1], reason=Reason.DEADLINE)
    assert_quiet(pipe)
    sent, lapsed = pipe.lead.ended_handoffs
    assert isinstance(sent, Sent)
    assert [name for name, _ in sent.timeline.marks] == ["made", "over"]
    assert isinstance(lapsed, Lapsed)
    assert lapsed.sentence == "DEADLINE (stage 1)"


def test_chunks_that_ran_alone_are_observed_once_all_stages_have_run_them():
    pipe = Pipe(2)
    pipe.add(text(2 * CHUNK + 2))
    pipe.run()
    alone = [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, 1)]
    assert [seen[:2] for seen in pipe.sizes.seen] == alone
    pipe.add(text(10))
    pipe.add(text(11))
    pipe.run()
    assert [seen[:2] for seen in pipe.sizes.seen] == alone, "of chunks that run together nothing"


def test_a_stage_is_as_busy_as_in_the_last_while():
    batches = Batches(1)
    for now_s, seconds in ((0.0, 4.0), (5.0, 3.0), (WINDOW_S + 1, 1.0)):
        batches.ran(0, batches.begin().number, seconds, now_s=now_s)
    assert batches.busy_share(0, now_s=WINDOW_S + 1) == 4.0 / WINDOW_S


def test_at_the_end_the_lead_s_team_is_told(monkeypatch: pytest.MonkeyPatch):
    pipe, told = Pipe(1), []
    monkeypatch.setattr(pipe.stages[0].ranks, "stop", lambda: told.append("stop"))
    pipe.lead.close()
    assert told == ["stop"]


def test_a_handoff_is_open_once():
    pipe = Pipe(2)
    pipe.add(text(100), uid=9)
    twice = pipe.add(text(101), uid=9)
    pipe.run()
    assert twice.reason == "refused"
    assert str(twice.refusal) == "handoff 9 is open already"
    pipe.release_all()
    again = pipe.add(text(101), uid=9)
    pipe.run()
    assert again.reason == "sent"


def test_followers_of_one_handoff_end_with_their_leader():
    pipe = Pipe(2)
    leader = pipe.add(text(200), uid=5)
    follower = pipe.add(text(200), uid=5, leader=leader)
    stranger = pipe.add(text(200), uid=6, leader=leader)
    pipe.run()
    assert [each.reason for each in (leader, follower, stranger)] == ["sent"] * 3
    assert stranger.cached_count == 128
    assert pipe.given(6).rows == pipe.given(5).rows


def test_the_heir_of_a_cancelled_leader_leads():
    pipe = Pipe(2)
    leader = pipe.add(text(200), uid=5)
    heir = pipe.add(text(200), uid=5, leader=leader)
    pipe.lead.step()
    pipe.lead.cancel(leader)
    pipe.run()
    assert heir.reason == "sent"


# ---- prefixes


def test_a_cached_prefix_is_found_alike_by_every_stage_and_skips_its_chunks():
    pipe = Pipe(4)
    shared = text(260)
    pipe.add(shared)
    pipe.run()
    tail = text(90, seed=4)
    second = pipe.add(shared[:250] + tail)
    pipe.run()
    assert second.cached_count == 128, "with MTP the last of three full pages is made again"
    assert_rows_of_second(pipe, shared, tail)
    pipe.release_all()
    assert_quiet(pipe)


def assert_rows_of_second(pipe: Pipe, shared: list[int], tail: list[int]) -> None:
    alone = engine_given([shared[:250] + tail])[0]
    assert pipe.given(2).keys == alone.keys
    assert pipe.given(2).rows == alone.rows


def test_a_prompt_that_is_all_cached_runs_through_no_layer():
    pipe = Pipe(2, mtp=False)
    pipe.add(text(200))
    pipe.run()
    again = pipe.add(text(200)[:129])
    pipe.run()
    assert (again.reason, again.cached_count) == ("sent", 128)
    assert [shelf.told[2] for shelf in pipe.shelves] == [[], []]
    assert pipe.given(2).rows == engine_given([text(200)[:129]], mtp=False)[0].rows
    assert pipe.given(2).windows == []
    pipe.release_all()
    assert_quiet(pipe)


def test_salts_share_nothing():
    pipe = Pipe(2)
    pipe.add(text(200), salt=b"a")
    pipe.run()
    other = pipe.add(text(200), salt=b"b")
    same = pipe.add(text(200), salt=b"a")
    pipe.run()
    assert (other.cached_count, same.cached_count) == (0, 128)


def test_prefixes_are_forgotten_on_every_stage_when_nothing_is_open():
    pipe = Pipe(2)
    pipe.add(text(200))
    pipe.run()
    with pytest.raises(BadState, match="1 prompts"):
        pipe.lead.forget_prefixes()
    pipe.release_all()
    pipe.lead.forget_prefixes()
    assert_quiet(pipe)
    assert pools(pipe.stages[1])["prefix"] == {}


def test_a_measurement_leaves_no_trace(monkeypatch):
    pipe = Pipe(1)
    before = pools(pipe.stages[0])
    assert pipe.lead.measure(200) > 0
    after = pools(pipe.stages[0])
    for key in ("prefix", "idle", "held", "active", "lines"):
        assert after[key] == before[key]
    assert pipe.lead.measure(1 << 20) is None
    pipe.add(text(200))
    pipe.run()


# ---- disagreement


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (
            Open(number=1, uid=1, cached_count=64, salt=b"", tokens=tuple(text(100))),
            "prompt 1: 0 rows are cached here, 64 there",
        ),
        (
            Open(number=1, uid=1, cached_count=0, salt=b"", tokens=tuple([1] * 10_000)),
            "prompt 1 was admitted, and here",
        ),
        (Run(1, (Part(5, 0, 10, True),)), "prompt 5 is not open here"),
        (GiveUp(5), "prompt 5 is not open"),
        (Close(5), "prompt 5 is not open"),
    ],
)
def test_a_stage_that_cannot_obey_says_so(order, sentence):
    with pytest.raises(Disagreement, match=sentence):
        Pipe(2).stages[1].obey(order)


def test_rows_that_are_read_are_not_closed():
    pipe = Pipe(2)
    pipe.add(text(100))
    pipe.run()
    with pytest.raises(Disagreement, match="its rows are read"):
        pipe.stages[1].obey(Close(0))


def test_a_batch_without_its_state_is_refused():
    pipe = Pipe(2)
    pipe.add(text(100))
    pipe.lead.step()
    stage = pipe.stages[1]
    stage.open(0, text(100), uid=1, salt=b"")
    with pytest.raises(Disagreement, match="a batch of 99 tokens came with a state of None"):
        stage.obey(Run(0, (Part(0, 0, 99, True),)))


def test_a_stage_whose_pools_differ_ends_the_group_and_is_named():
    pipe = Pipe(2)
    pipe.stages[1].offload.open(text(10), length_max=10)
    pipe.add(text(100))
    with pytest.raises(StageLost, match=r"stage 1 \(layers 2\.\.3\) disagrees: behind frame 1"):
        pipe.run()


@pytest.mark.parametrize("differs", [False, True])
def test_a_stage_that_is_done_with_a_chunk_before_the_lead_is_compared_too(differs):
    pipe = Pipe(2)
    leaves = pipe.stages[0].leaves

    def leaves_and_waits(hidden):
        leaves(hidden)
        if differs and not pipe.lead.stages._taken[1]:
            pipe.stages[1].offload.open(text(10), length_max=10)
        pipe.followers[0].turn()
        pipe.lead.stages.listen()
        assert pipe.lead.stages._taken[1] == pipe.lead.stages._sent_count

    pipe.stages[0].leaves = leaves_and_waits
    pipe.add(text(300))
    if differs:
        with pytest.raises(StageLost, match="disagrees: behind frame 1 it has"):
            pipe.lead.step()
        return
    pipe.run()
    pipe.release_all()
    assert_quiet(pipe)


def test_a_stage_of_another_model_is_not_let_in():
    pipe = Pipe(2)
    hello = pipe.stages[1].hello(bytes([1] * 32))
    with pytest.raises(StageLost, match=r"stage 1 \(layers 2\.\.3\) does not fit"):
        pipe.lead.stages._check_fit(pipe.hellos[0], 1, hello)


def test_a_lost_stage_is_named_with_its_layers():
    pipe = Pipe(4)
    pipe.add(text(300))
    pipe.lead.step()
    pipe.groups[2].fail("out of memory")
    with pytest.raises(StageLost, match=r"stage 2 \(layers 2\.\.2\): out of memory"):
        pipe.run()


def test_another_worker_is_met_by_every_stage():
    pipe = Pipe(3)
    pipe.lead.meet(b"who it is")
    pipe.settle()
    assert [shelf.met for shelf in pipe.shelves] == [[], [b"who it is"], [b"who it is"]]


def test_all_stages_stop_in_order_and_leave_no_garbage():
    """A refused request that the caller keeps holds nothing either."""
    pipe = Pipe(3, page_count=4)
    refused = pipe.add(text(700))
    pipe.add(text(CHUNK))
    pipe.run()
    pipe.release_all()
    closing = threading.Thread(target=pipe.lead.close)
    closing.start()
    for rank, follower in enumerate(pipe.followers, 1):
        closing.join(0.1)
        assert closing.is_alive(), "the lead does not leave before all stages have obeyed"
        follower.run()
        pipe.groups[rank].close()
        assert follower.is_stopped
    closing.join(30)
    assert not closing.is_alive()
    owners = [pipe.lead, *pipe.followers, *pipe.stages, *(each.offload for each in pipe.stages)]
    gone = [weakref.ref(each) for each in owners]
    gc.disable()
    try:
        del pipe, follower, owners, closing
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()
    assert refused.refusal is not None
