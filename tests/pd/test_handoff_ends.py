"""Handoffs that are cancelled, scored, invented or refused leave nothing behind."""

from __future__ import annotations

import pytest

from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from tests.pd.rigs import Pair, Worker, alone, offload_of
from tests.support.checkpoints import small, tokens

TEXT = tokens(700, 512, seed=3)
WISH = Sampling(tokens_max=6, ignore_eos=True)


def assert_free(*workers: Worker) -> None:
    """Every page is free once cached prefixes are forgotten: no request or handoff holds one."""
    for worker in workers:
        worker.offload.forget_prefixes()
        stats = worker.offload.stats()
        assert stats.free_host_page_count == stats.host_page_count
        assert stats.free_index_page_count == stats.index_page_count
        assert worker.is_quiet


def walk(pair: Pair, request: Request, state: str) -> None:
    pair.until(lambda: request.state == state)


@pytest.mark.parametrize("state", ["waiting", "landing", "preempted", "decoding"])
def test_a_request_that_takes_may_be_cancelled_at_any_time(state: str):
    """A prefill worker that has begun learns of it at once; otherwise the handoff ends with its
    lease."""
    pair = Pair(pools={"lines": 1}, lease_s=2.0)
    pair.uid = 7
    blocker = None
    if state in ("waiting", "preempted"):
        blocker = pair.decode.engine.add(TEXT[600:640], Sampling(tokens_max=300, ignore_eos=True))
    if state == "preempted":
        for _ in range(3):
            pair.step()
    taken = pair.take(TEXT[:200], WISH)
    if state in ("preempted", "decoding"):
        pair.give(TEXT[:200])
    if state != "waiting":
        walk(pair, taken, state)
    pair.decode.engine.cancel(taken)
    pair.decode.engine.check()
    if state in ("waiting", "landing"):
        pair.give(TEXT[:200])
    assert taken.reason == "cancelled"
    if blocker is not None:
        pair.decode.engine.cancel(blocker)
    for _ in range(30):
        pair.step()
    pair.clock.advance(2.0)
    pair.run()
    assert_free(pair.prefill, pair.decode)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "finished"])
def test_a_request_that_gives_may_be_cancelled_at_any_time(state: str):
    """The decode worker computes the prompt itself; a finished one is not undone."""
    pair = Pair()
    given, taken = pair.add(TEXT[:300], WISH)
    if state != "waiting":
        walk(pair, given, state)
    pair.prefill.engine.cancel(given)
    if state == "waiting":
        walk(pair, taken, "landing")
    if state != "finished":
        pair.clock.advance(6.0)
    pair.run()
    assert given.reason == ("sent" if state == "finished" else "cancelled")
    assert [taken.output] == alone([(TEXT[:300], WISH)])
    assert pair.decode.port.counts.landed_count == (state == "finished")
    assert_free(pair.prefill, pair.decode)


def test_a_time_line_goes_on_to_the_first_step():
    """A handoff that is cancelled before has no such moment, and is reported all the same."""
    pair = Pair(pools={"lines": 1})
    blocker = pair.decode.engine.add(TEXT[600:640], Sampling(tokens_max=300, ignore_eos=True))
    _, goes = pair.add(TEXT[:200], WISH)
    walk(pair, goes, "preempted")
    for request in (goes, blocker):
        pair.decode.engine.cancel(request)
    _, stays = pair.add(TEXT[200:400], WISH)
    pair.run()
    assert len(stays.output) == 6
    cut, whole = [outcome.timeline.marks for outcome in pair.decode.engine.ended_handoffs]
    assert [name for name, _ in whole][-3:] == ["landed", "warmed", "first step"]
    assert cut[-1][0] == "landed"
    assert [at_s for _, at_s in whole] == sorted(at_s for _, at_s in whole)
    pair.decode.engine.check()


def test_a_lease_ends_what_nobody_fetches():
    pair = Pair(lease_s=3.0)
    pair.uid = 1
    given = pair.give(TEXT[:300])
    walk(pair, given, "finished")
    assert given.reason == "sent"
    assert pair.prefill.engine.is_handing_over
    assert (
        pair.prefill.offload.stats().free_host_page_count
        < pair.prefill.offload.stats().host_page_count
    )
    pair.clock.advance(3.5)
    pair.step()
    assert_free(pair.prefill)
    assert pair.prefill.port.counts.lapsed_count == 1


def test_a_prompt_waits_for_pages_of_prompts_that_nobody_has_fetched_yet():
    """The prompt begins when one of their handoffs is over, also while another request decodes."""
    pair = Pair(prefill_pools={"host_pages": 12, "lines": 4}, lease_s=3.0)
    other = pair.prefill.engine.add(TEXT[650:660], Sampling(tokens_max=200, ignore_eos=True))
    pair.uid = 1
    first = pair.give(TEXT[:300])
    walk(pair, first, "finished")
    pair.uid = 2
    second = pair.give(TEXT[100:400])
    for _ in range(5):
        pair.step()
    assert second.state == "waiting"
    pair.clock.advance(3.5)
    walk(pair, second, "finished")
    assert (second.reason, other.state) == ("sent", "decoding")


def test_a_prompt_that_is_scored_is_computed_here():
    pair = Pair()
    wish = Sampling(tokens_max=6, ignore_eos=True, prompt_logprobs=1)
    pair.uid = 1
    taken = pair.take(TEXT[:200], wish)
    scored = 0
    while taken.reason is None:
        scored += sum(map(len, pair.decode.engine.step().scored))
    assert scored == 199
    assert [taken.output] == alone([(TEXT[:200], WISH)])
    assert len(pair.decode.port.receiver) == 0


def test_heirs_of_a_leader_that_is_cancelled_compute_the_prompt():
    pair = Pair()
    pair.uid = 3
    leader = pair.take(TEXT[:200], WISH)
    follower = pair.decode.engine.add(TEXT[:200], WISH, leader=leader)
    walk(pair, leader, "landing")
    pair.decode.engine.cancel(leader)
    pair.run()
    assert [follower.output] == alone([(TEXT[:200], WISH)])


def test_followers_of_a_prompt_that_does_not_come_share_its_prefill():
    pair = Pair(mtp=2)
    pair.uid = 3
    leader = pair.take(TEXT[:200], WISH)
    follower = pair.take(TEXT[:200], WISH, leader=leader)
    walk(pair, leader, "landing")
    pair.clock.advance(6.0)
    pair.run()
    assert [leader.output, follower.output] == alone([(TEXT[:200], WISH)] * 2, mtp=2)
    assert follower.cached_count == 192


def test_invented_rows_decode_and_are_found_by_nobody():
    eng = Engine(small(), offload_of(mtp=2), EngineConfig(mtp=2, fake_prefill=True))
    wish = Sampling(tokens_max=9, ignore_eos=True)
    leader = eng.add(TEXT[:300], wish, take=Take(0, fake=True))
    follower = eng.add(TEXT[:300], wish, leader=leader, take=Take(0, fake=True))
    for _ in eng.run():
        eng.check()
    assert [len(leader.output), len(follower.output)] == [9, 9]
    assert eng.warmth.asked.sum() > 0
    honest = eng.add(TEXT[:300], wish)
    for _ in eng.run():
        eng.check()
    assert honest.cached_count == 0
    assert [honest.output] == alone([(TEXT[:300], wish)], mtp=2)


def test_wishes_that_this_engine_has_no_part_in():
    eng = Engine(small(), offload_of(), EngineConfig())
    for wish in ({"give": 1}, {"take": Take(1, 2)}):
        with pytest.raises(BadInput, match="takes part in no handoffs"):
            eng.add(TEXT[:10], WISH, **wish)
    with pytest.raises(BadInput, match="fake_prefill is off"):
        eng.add(TEXT[:10], WISH, take=Take(1, fake=True))
    pair = Pair()
    for uid in (-1, 1 << 63):
        with pytest.raises(BadInput, match=f"handoff {uid}: its number must be 0 to"):
            pair.prefill.engine.add(TEXT[:10], WISH, give=uid)
    with pytest.raises(BadInput, match="handoff 3 gives the rows that 4 takes"):
        pair.decode.engine.add(TEXT[:10], WISH, give=3, take=Take(4, 1))


def test_one_number_is_given_once():
    pair = Pair()
    pair.uid = 9
    first, second = pair.give(TEXT[:200]), pair.give(TEXT[:200])
    walk(pair, first, "finished")
    assert (first.reason, second.reason) == ("sent", "refused")
    assert "handoff 9 is open" in str(second.refusal)


@pytest.mark.parametrize("mtp", [1, 2])
def test_the_first_steps_find_as_many_rows_in_slots_as_after_a_prefill_here(mtp: int):
    """The windows travel, so a request that has landed is as warm as one that was prefilled."""
    wish = Sampling(tokens_max=16, ignore_eos=True)
    pair = Pair(mtp=mtp, modes="none", chunk_tokens=512, pools={"slot_pages": 2})
    pair.add(TEXT[:600], wish)
    pair.run()
    offload = offload_of(mtp=mtp, slot_pages=2)
    eng = Engine(small(), offload, EngineConfig(mtp=mtp, modes="none", chunk_tokens=512))
    eng.add(TEXT[:600], wish)
    for _ in eng.run():
        pass
    there, here = pair.decode.engine.warmth, eng.warmth
    assert there.asked.tolist() == here.asked.tolist()
    assert there.hits.tolist() == here.hits.tolist()
    assert 0 < here.hits.sum() < here.asked.sum()
