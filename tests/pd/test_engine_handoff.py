"""Prompts that one engine prefills and another one decodes: tokens as from an engine alone."""

from __future__ import annotations

import functools
from itertools import product

import pytest

from ess.door.handoff.endings import Missed
from ess.engine.requests.request import Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import Unavailable
from ess.transfer.messages import UID_MAX
from tests.pd.rigs import Pair, alone
from tests.support.checkpoints import tokens
from tests.support.few import few

TEXT = tokens(700, 512, seed=3)
WISH = Sampling(tokens_max=6, ignore_eos=True)
LENGTHS = (1, 2, 63, 64, 65, 66, 129, 330, 129, 66, 200)


def asked_of(lengths, tokens_max=12):
    """Greedy ones and sampled ones; all prompts begin alike."""
    return [
        (
            TEXT[:count],
            Sampling(tokens_max=tokens_max, ignore_eos=True, seed=at, temperature=at % 2),
        )
        for at, count in enumerate(lengths)
    ]


EVERY = product((1, 2, 4), (0, 1), (None, 16))
PAIRS = [(1, 0, None), (1, 1, 16), (2, 0, 16), (2, 1, None), (4, 0, 16), (4, 1, None)]
"""Every two values meet in one of them."""


@functools.cache
def expected(mtp: int) -> list[list[int]]:
    return alone(asked_of(LENGTHS, tokens_max=8), mtp=mtp)


@pytest.mark.parametrize(("mtp", "depth", "index_pages"), few(PAIRS, all_of=EVERY))
def test_tokens_are_those_of_an_engine_alone(mtp: int, depth: int, index_pages: int | None):
    asked = asked_of(LENGTHS, tokens_max=8)
    pair = Pair(mtp=mtp, depth=depth, pools={"index_pages": index_pages})
    added = [pair.add(*each) for each in asked]
    pair.run()
    assert [given.reason for given, _ in added] == ["sent"] * len(asked)
    assert [taken.output for _, taken in added] == expected(mtp)
    assert pair.decode.port.counts.landed_count == len(asked)


def test_prefixes_that_both_sides_have_do_not_travel_again():
    pair = Pair(mtp=2)
    first = pair.add(TEXT[:400], Sampling(tokens_max=4, ignore_eos=True))
    pair.run()
    before = pair.decode.port.counts.received_bytes
    second = pair.add([*TEXT[:400], *TEXT[500:520]], Sampling(tokens_max=4, ignore_eos=True))
    pair.run()
    after = pair.decode.port.counts.received_bytes
    assert second[1].cached_count == 5 * 64
    assert second[0].cached_count == 5 * 64
    assert after - before < before / 2
    prompts = [TEXT[:400], [*TEXT[:400], *TEXT[500:520]]]
    wish = Sampling(tokens_max=4, ignore_eos=True)
    expected = alone([(prompt, wish) for prompt in prompts], mtp=2)
    assert [first[1].output, second[1].output] == expected


def test_a_prompt_that_the_receiver_has_lands_with_windows_alone():
    pair = Pair()
    pair.add(TEXT[:129], Sampling(tokens_max=4, ignore_eos=True))
    pair.run()
    _, taken = pair.add(TEXT[:129], Sampling(tokens_max=4, ignore_eos=True))
    pair.run()
    assert taken.cached_count == taken.prefill_count == 128
    assert [taken.output] == alone([(TEXT[:129], taken.sampling)])


@pytest.mark.parametrize("place", ["offer", "_aim"])
def test_an_offer_that_breaks_off_leaves_its_pages(place: str, monkeypatch: pytest.MonkeyPatch):
    """Before the handoff is open, and when it is; the receiver's pages are known."""
    pair = Pair()
    before = pair.prefill.offload.stats()
    given, taken = pair.add(TEXT[:200], Sampling(tokens_max=4, ignore_eos=True))
    while not len(pair.prefill.port.sender._orphans):
        pair.decode.engine.step()
        pair.prefill.engine.pump()

    def broken(*args: object, **named: object) -> None:
        raise MemoryError("no memory for an offer")

    with monkeypatch.context() as patch:
        patch.setattr(pair.prefill.port.sender, place, broken)
        with pytest.raises(MemoryError):
            pair.prefill.engine.step()
    left = pair.prefill.offload.stats()
    assert left.free_host_page_count == before.free_host_page_count
    assert left.free_index_page_count == before.free_index_page_count
    pair.run()
    assert given.reason == "sent"
    assert [taken.output] == alone([(TEXT[:200], taken.sampling)])
    free(pair.prefill)


@pytest.mark.parametrize("uid", [0, 5, UID_MAX])
@pytest.mark.parametrize("first", ["give", "take"])
def test_either_leg_may_come_first(first: str, uid: int):
    """Of a handoff of any number: routers of SGLang may draw a room of 0."""
    pair, wish = Pair(), Sampling(tokens_max=6, ignore_eos=True)
    pair.uid = uid
    legs = {"give": lambda: pair.give(TEXT[:200]), "take": lambda: pair.take(TEXT[:200], wish)}
    early = legs.pop(first)()
    for _ in range(20):
        pair.step()
    assert early.state == ("finished" if first == "give" else "landing")
    late = next(iter(legs.values()))()
    pair.run()
    taken = late if first == "give" else early
    assert [taken.output] == alone([(TEXT[:200], wish)])
    assert pair.decode.port.counts.landed_count == pair.prefill.port.counts.sent_count == 1


def test_choices_of_one_prompt_are_handed_over_once():
    pair = Pair(mtp=2, pools={"lines": 4})
    wishes = [
        Sampling(tokens_max=8, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(4)
    ]
    given, leader = pair.add(TEXT[:150], wishes[0])
    gift = pair.give(TEXT[:150], leader=given)
    others = [pair.take(TEXT[:150], wish, leader=leader) for wish in wishes[1:]]
    pair.run()
    assert (given.reason, gift.reason) == ("sent", "sent")
    expected = alone([(TEXT[:150], wish) for wish in wishes], mtp=2)
    assert [leader.output, *(other.output for other in others)] == expected
    assert pair.decode.port.counts.landed_count == 1
    assert [other.cached_count for other in others] == [128] * 3


def test_preemption_under_small_pools_keeps_the_tokens():
    asked = asked_of((300, 250, 200, 310, 120, 280), tokens_max=60)
    pair = Pair(mtp=2, pools={"index_pages": 14, "host_pages": 48, "lines": 3})
    added = [pair.add(*each) for each in asked]
    pair.run()
    assert [taken.output for _, taken in added] == alone(asked, mtp=2)
    assert pair.decode.engine.preempted_count > 0


def test_rows_arrive_while_the_device_is_full():
    """The second needs the only line; its rows come while the first decodes."""
    pair, wish = Pair(pools={"lines": 1}), Sampling(tokens_max=60, ignore_eos=True)
    (_, first), (_, second) = pair.add(TEXT[:100], wish), pair.add(TEXT[200:400], wish)
    pair.until(lambda: second.has_landed)
    assert (first.state, second.state) == ("decoding", "preempted")
    pair.run()
    asked = [(TEXT[:100], wish), (TEXT[200:400], wish)]
    assert [first.output, second.output] == alone(asked)


def test_landings_wait_for_one_another_and_leave_room_to_grow():
    """Host pages for one long request at a time: none lands into another one's growth."""
    asked = asked_of((193, 193, 193), tokens_max=66)
    pair = Pair(pools={"host_pages": 8, "lines": 4})
    added = [pair.add([at, *prompt[1:]], wish) for at, (prompt, wish) in enumerate(asked)]
    pair.run()
    expected = alone([([at, *prompt[1:]], wish) for at, (prompt, wish) in enumerate(asked)])
    assert [taken.output for _, taken in added] == expected


@pytest.mark.parametrize("arrivals_max", [1, 2])
def test_no_more_arrive_at_once_than_are_allowed(arrivals_max: int):
    asked = asked_of((100, 90, 80, 70, 60))
    pair = Pair(arrivals_max=arrivals_max)
    added = [pair.add(*each) for each in asked]
    most = 0

    def is_done() -> bool:
        nonlocal most
        most = max(most, len(pair.decode.port.receiver))
        return pair.prefill.is_quiet and pair.decode.is_quiet

    pair.until(is_done)
    assert most == arrivals_max
    assert [taken.output for _, taken in added] == alone(asked)


# ---- what goes wrong


def missed(pair: Pair, cause: str):
    """A request whose rows do not come, and why."""
    pair.uid += 1
    wish = Sampling(tokens_max=6, ignore_eos=True)
    if cause == "unknown peer":
        return pair.decode.engine.add(TEXT[:200], wish, take=Take(pair.uid, 77))
    taken = pair.take(TEXT[:200], wish)
    pair.until(lambda: taken.state == "landing")
    if cause == "silence":
        pair.clock.advance(6.0)
    elif cause == "another text":
        pair.give(TEXT[1:201])
    elif cause == "peer lost":
        pair.prefill.transport.close()
    elif cause == "given up":
        given = pair.give(TEXT[:200])
        pair.until(lambda: given.state == "prefilling")
        pair.prefill.engine.cancel(given)
        pair.clock.advance(4.0)
    return taken


CAUSES = ("unknown peer", "silence", "another text", "peer lost", "given up")


def step_decode(pair: Pair) -> None:
    pair.clock.advance(0.01)
    if pair.prefill.transport._is_closed:
        pair.decode.step()
    else:
        pair.step()


def run_to_end(pair: Pair, request) -> None:
    for _ in range(3000):
        if request.reason is not None:
            return
        step_decode(pair)
    raise AssertionError(f"request {request.number} is {request.state}")


@pytest.mark.parametrize("cause", CAUSES)
def test_rows_that_do_not_come_are_computed_here(cause: str):
    pair = Pair()
    taken = missed(pair, cause)
    run_to_end(pair, taken)
    assert [taken.output] == alone([(TEXT[:200], taken.sampling)])
    assert pair.decode.port.counts.missed_count == 1
    assert [type(each) for each in pair.decode.engine.ended_handoffs] == [Missed]


@pytest.mark.parametrize("take", [Take(9, 77), Take(9, fake=True)])
def test_what_needs_no_landing_goes_on_though_another_waits_for_room(take: Take):
    """Rows of `taken` cannot come, or are invented: there is room for it while `other` waits for
    the end of `first`."""
    pair = Pair(pools={"host_pages": 16}, fake_prefill=True)
    wish = Sampling(tokens_max=300, ignore_eos=True)
    first = pair.decode.engine.add(TEXT[:64], wish)
    pair.until(lambda: first.state == "decoding")
    taken = pair.decode.engine.add(TEXT[100:200], WISH, take=take)
    other = pair.decode.engine.add(TEXT[200:650], wish)
    pair.until(lambda: taken.reason is not None or first.reason is not None)
    assert (taken.reason, first.state, other.state) == ("length", "decoding", "waiting")


@pytest.mark.parametrize("cause", CAUSES)
def test_or_the_request_is_refused_and_may_be_asked_again(cause: str):
    pair = Pair(handoff_failure="refuse")
    taken = missed(pair, cause)
    run_to_end(pair, taken)
    assert taken.reason == "refused"
    assert isinstance(taken.refusal, Unavailable)
    assert f"handoff {pair.uid}" in str(taken.refusal)
    free(pair.decode)


def free(worker) -> None:
    worker.offload.forget_prefixes()
    stats = worker.offload.stats()
    assert stats.free_host_page_count == stats.host_page_count
    assert stats.free_index_page_count == stats.index_page_count
