"""Prompts of DeepSeek-V4 that one engine prefills and another one decodes: entries, and a state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ess.door.sequences import kept
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, Unavailable
from tests.compressed import world
from tests.pd.rigs import Pair
from tests.pd.test_handoff_ends import assert_free
from tests.states.world import LINE, MADE, OTHER, V4, V4_PUBLISHED, World
from tests.support.few import few
from tests.support.greedy import greedy

PAGE = V4.page
LENGTHS = (1, 2, 4, 5, 8, 9, PAGE, PAGE + 1, PAGE + 2, PAGE + 5, 530)
WAYS = [("resident", 0), ("resident", 1), ("none", 1), ("none", 0)]
WAYS += [("da", 0), ("da", 1), ("dba", 1), ("dba", 0)]
"""Every second one is long; engines without a handoff take every pair of a mode and a depth."""
WISH = Sampling(tokens_max=MADE, ignore_eos=True)
CAUSES = ("unknown peer", "silence", "another text", "peer lost", "given up", "given up late")


def pair_of(*, own: World = V4, pools: Any = None, **config: Any) -> Pair:
    """`pools` are those of the worker that decodes."""
    model = {"model": own.model()}
    return Pair(pools={**model, **(pools or {})}, prefill_pools=model, **config)


def all_said(pair: Pair, lengths: tuple[int, ...], *, own: World = V4) -> None:
    added = [pair.add(LINE[:length], WISH) for length in lengths]
    pair.run()
    for (given, taken), length in zip(added, lengths, strict=True):
        assert given.reason == "sent"
        assert taken.output == own.told(length), length
    stats = pair.decode.port.counts
    assert (stats.landed_count, stats.missed_count) == (len(lengths), 0)
    assert_free(pair.prefill, pair.decode)


@pytest.mark.parametrize(
    ("mode", "depth"),
    [
        ("layerwise", 1),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[::2]),
        *(pytest.param(*way, marks=[pytest.mark.slow, pytest.mark.long]) for way in WAYS[1::2]),
    ],
)
def test_tokens_are_those_of_the_plain_model(mode: str, depth: int) -> None:
    """With slots for few entries; lines are fewer than requests."""
    all_said(pair_of(modes=mode, depth=depth, pools={"slot_pages": 1}), LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 21, 100, 300, 900])
def test_chunks_end_anywhere(chunk: int) -> None:
    """Also behind the end of a page, where a state is kept: a chunk is run in two pieces there."""
    lengths = (13, PAGE + 3, 530) if chunk > 3 else (13, 14, 15, 16)
    all_said(pair_of(chunk_tokens=chunk), lengths)


@pytest.mark.parametrize("mode", ["layerwise", "none"])
def test_published_windows_go_over_too(mode: str) -> None:
    lengths = (1, 127, 128, 131, 300)
    all_said(pair_of(own=V4_PUBLISHED, modes=mode), lengths, own=V4_PUBLISHED)


def test_rows_leave_layer_by_layer_while_a_prompt_is_made() -> None:
    """What the receiver has at the end of each layer grows within one chunk."""
    pair = pair_of(chunk_tokens=600)
    counts: list[int] = []
    made = pair.prefill.port.sender.made

    def noted(uid: int, layer: int, stop: int) -> None:
        made(uid, layer, stop)
        pair.prefill.port.pump()
        pair.decode.port.pump()
        counts.append(pair.decode.port.counts.received_bytes)

    pair.uid = 1
    taken = pair.take(LINE[:600], WISH)
    pair.until(lambda: len(pair.prefill.port.sender._orphans) == 1)
    pair.prefill.port.sender.made = noted
    pair.give(LINE[:600])
    pair.run()
    assert len(counts) == len(world.tiny().chosen_layers) == 2
    assert 0 < counts[0] < counts[1]
    assert taken.output == V4.told(600)


# ---- prefixes


def test_a_hit_of_the_giver_begins_at_a_state_and_sends_one() -> None:
    pair = pair_of()
    pair.add(LINE[:700], WISH)
    pair.run()
    pair.decode.engine.forget_prefixes()
    for length, cached in ((700, 512), (513, 512), (600, 512)):
        given, taken = pair.add(LINE[:length], WISH)
        pair.run()
        assert (given.cached_count, taken.output) == (cached, V4.told(length)), length
        pair.decode.engine.forget_prefixes()


def test_a_hit_of_the_taker_needs_no_state() -> None:
    """One comes with the handoff: the rows behind the cached ones, however these came."""
    pair = pair_of()
    _, first = pair.add(LINE[:700], WISH)
    pair.run()
    states = pair.decode.offload.owner.pools.states
    assert states is not None
    assert len(states.kept) == 0
    before = pair.decode.port.counts.received_bytes
    whole = LINE[:700] + first.output + OTHER[:100]
    for prompt, cached in ((LINE[:700], 512), (LINE[:400], 256), (whole, 512)):
        _, taken = pair.add(prompt, WISH)
        pair.run()
        assert taken.cached_count == cached
        assert taken.output == greedy(world.tiny(), prompt, MADE)
    layout = pair.decode.offload.layout
    rows = pair.decode.port.counts.received_bytes - before
    assert rows < 3 * (2 * layout.host_page_bytes + layout.request_state_bytes(1024) + 1000)


def test_a_state_that_came_is_kept_for_prompts_of_the_taker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the prompt ends with a page; and of what it decodes as ever."""
    monkeypatch.setattr(kept, "KEPT_TOKENS", PAGE)
    pair = pair_of()
    pair.add(LINE[: 2 * PAGE + 1], WISH)
    _, grown = pair.add(OTHER[: PAGE - 3], WISH)
    pair.run()
    for prompt, cached in (
        (LINE[:700], 2 * PAGE),
        (OTHER[: PAGE - 3] + grown.output, PAGE),
    ):
        alone = pair.decode.engine.add(prompt, WISH)
        pair.run()
        assert alone.cached_count == cached
        assert alone.output == greedy(world.tiny(), prompt, MADE)


# ---- preemption, choices


def test_preemption_behind_an_arrival_keeps_the_tokens() -> None:
    pair = pair_of(pools={"lines": 2, "index_pages": 6, "host_pages": 24})
    added = [pair.add(line[:length], WISH) for length in (300, 530, 259) for line in (LINE, OTHER)]
    held: list[Request] = []

    def is_done() -> bool:
        for _, taken in added:
            if taken.state == "decoding" and taken not in held and len(taken.output) == 2:
                pair.decode.engine.preempt(taken)
                held.append(taken)
        for taken in held:
            if taken.state == "preempted" and taken.is_held:
                taken.is_held = False
        return all(taken.reason for _, taken in added)

    pair.until(is_done)
    assert len(held) == len(added)
    for number, (given, taken) in enumerate(added):
        length, line = len(taken.prompt), number % 2
        assert given.reason == "sent"
        assert taken.output == V4.told(length, line=line), length
    pair.run()
    assert_free(pair.prefill, pair.decode)


def test_states_arrive_while_the_device_is_full() -> None:
    pair, long = pair_of(pools={"lines": 1}), Sampling(tokens_max=40, ignore_eos=True)
    (_, first), (_, second) = pair.add(LINE[:30], long), pair.add(OTHER[:300], WISH)
    pair.until(lambda: second.has_landed)
    assert (first.state, second.state) == ("decoding", "preempted")
    pair.run()
    assert first.output == V4.told(30, count=40)
    assert second.output == V4.told(300, line=1)


def test_choices_of_one_prompt_are_handed_over_once() -> None:
    pair, prompt = pair_of(pools={"lines": 4}), LINE[: PAGE + 3]
    wishes = [
        Sampling(tokens_max=MADE, ignore_eos=True, temperature=1.5, seed=seed) for seed in range(3)
    ]
    _, leader = pair.add(prompt, wishes[0])
    others = [pair.take(prompt, wish, leader=leader) for wish in wishes[1:]]
    pair.run()
    assert pair.decode.port.counts.landed_count == 1
    said = [request.output for request in (leader, *others)]
    assert said == sampled(PAGE + 3)
    assert len({tuple(output) for output in said}) == 3


@functools.cache
def sampled(length: int) -> list[list[int]]:
    """By an engine alone."""
    pair = pair_of()
    requests = [
        pair.decode.engine.add(
            LINE[:length],
            Sampling(tokens_max=MADE, ignore_eos=True, temperature=1.5, seed=seed),
        )
        for seed in range(3)
    ]
    pair.run()
    return [request.output for request in requests]


# ---- it is not to be


@pytest.mark.parametrize("state", ["waiting", "landing", "preempted", "decoding"])
def test_a_request_that_takes_may_be_cancelled_at_any_time(state: str) -> None:
    pair = pair_of(pools={"lines": 1}, lease_s=2.0)
    blocker = None
    if state in ("waiting", "preempted"):
        blocker = pair.decode.engine.add(OTHER[:40], Sampling(tokens_max=300, ignore_eos=True))
        for _ in range(3):
            pair.step()
    pair.uid = 7
    taken = pair.take(LINE[:300], WISH)
    if state in ("preempted", "decoding"):
        pair.give(LINE[:300])
    if state != "waiting":
        pair.until(lambda: taken.state == state)
    pair.decode.engine.cancel(taken)
    pair.decode.engine.check()
    if state in ("waiting", "landing"):
        pair.give(LINE[:300])
    if blocker is not None:
        pair.decode.engine.cancel(blocker)
    for _ in range(30):
        pair.step()
    pair.clock.advance(2.0)
    pair.run()
    assert taken.reason == "cancelled"
    assert_free(pair.prefill, pair.decode)


@pytest.mark.slow
@pytest.mark.parametrize("count", range(1, 12))
def test_a_request_may_be_cancelled_at_every_leg_of_its_handoff(count: int) -> None:
    """Cancelled after so many units have come; the last units are those of its state."""
    pair = pair_of(chunk_tokens=300)
    _, taken = pair.add(LINE[:600], WISH)
    receiver = pair.decode.port.receiver

    def has_come() -> bool:
        legs = [leg for entry in receiver._entries.values() for leg in entry.legs]
        return taken.state != "landing" or any(leg.arrival.count.arrived >= count for leg in legs)

    pair.until(lambda: taken.state == "landing")
    pair.until(has_come)
    pair.decode.engine.cancel(taken)
    pair.run()
    assert taken.reason == "cancelled"
    assert len(receiver) == 0
    assert_free(pair.prefill, pair.decode)


def missed(pair: Pair, cause: str) -> Request:
    """A request whose rows or state do not come, and why."""
    pair.uid += 1
    if cause == "unknown peer":
        return pair.decode.engine.add(LINE[:600], WISH, take=Take(pair.uid, 77))
    taken = pair.take(LINE[:600], WISH)
    pair.until(lambda: taken.state == "landing")
    if cause == "silence":
        pair.clock.advance(6.0)
    elif cause == "another text":
        pair.give(LINE[1:601])
    elif cause == "peer lost":
        pair.prefill.transport.close()
    else:
        given = pair.give(LINE[:600])
        came = pair.decode.port.counts
        late = cause == "given up late"
        pair.until(lambda: came.received_bytes > 0 if late else given.state == "prefilling")
        pair.prefill.engine.cancel(given)
    return taken


def run_to_end(pair: Pair, is_so: Callable[[], bool]) -> None:
    for _ in range(300):
        if is_so():
            return
        pair.clock.advance(0.1)
        if pair.prefill.transport._is_closed:
            pair.decode.step()
        else:
            pair.step()
    raise AssertionError("it has no end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "cached"),
    few(
        [(cause, bool(at % 2)) for at, cause in enumerate(CAUSES)],
        all_of=itertools.product(CAUSES, (False, True)),
    ),
)
def test_what_does_not_come_is_computed_here(cause: str, cached: bool) -> None:
    """Also where rows of its beginning are cached, without a state."""
    pair = pair_of()
    if cached:
        pair.add(LINE[:530], WISH)
        pair.run()
    taken = missed(pair, cause)
    if cause != "unknown peer":
        assert taken.cached_count == (512 if cached else 0)
    run_to_end(pair, lambda: taken.reason is not None)
    assert (taken.cached_count, taken.output) == (0, V4.told(600))
    all_pages_are_free(pair)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_or_the_request_is_refused(cause: str) -> None:
    pair = pair_of(handoff_failure="refuse")
    taken = missed(pair, cause)
    run_to_end(pair, lambda: taken.reason is not None)
    assert taken.reason == "refused"
    assert isinstance(taken.refusal, Unavailable)
    assert f"handoff {pair.uid}" in str(taken.refusal)
    all_pages_are_free(pair)


def all_pages_are_free(pair: Pair) -> None:
    """Those of the worker that decodes; the peer may be lost."""
    pair.decode.offload.forget_prefixes()
    stats = pair.decode.offload.stats()
    assert stats.free_host_page_count == stats.host_page_count


def test_a_prompt_that_is_all_cached_still_needs_its_state() -> None:
    """All rows are there, and the state is not: without the handoff it is computed again."""
    pair = pair_of()
    pair.add(LINE[: 2 * PAGE + 5], WISH)
    pair.run()
    pair.uid = 9
    taken = pair.take(LINE[: 2 * PAGE + 1], WISH)
    pair.until(lambda: taken.state == "landing")
    assert taken.is_prefilled
    pair.clock.advance(6.0)
    pair.run()
    assert taken.output == V4.told(2 * PAGE + 1)


def test_a_request_that_begins_again_is_asked_for_at_once() -> None:
    """Also while another one runs, and a later one waits for the pages that it has given up. Until
    it is let in again its prompt is not there, whatever was cached."""
    pair = pair_of(pools={"lines": 2, "host_pages": 7})
    engine = pair.decode.engine
    runs = engine.add(LINE[:20], Sampling(tokens_max=200, ignore_eos=True))
    pair.until(lambda: runs.state == "decoding")
    taken = engine.add(LINE[:600], WISH, take=Take(1, 77))
    later = engine.add(LINE[:900], WISH)
    pair.step()
    assert (taken.state, later.state) == ("landing", "waiting")
    pair.step()
    assert (taken.state, later.state, runs.state) == ("prefilling", "waiting", "decoding")
    pair.run()
    assert (taken.output, later.output) == (V4.told(600), V4.told(900))


def test_a_prompt_that_begins_again_is_not_there_until_it_is_let_in() -> None:
    """A follower that comes meanwhile waits for it, though all rows were cached."""
    pair = pair_of(pools={"lines": 1})
    engine, prompt = pair.decode.engine, LINE[: 2 * PAGE + 1]
    pair.add(LINE[: 2 * PAGE + 5], WISH)
    pair.run()
    runs = engine.add(LINE[:20], Sampling(tokens_max=40, ignore_eos=True))
    pair.until(lambda: runs.state == "decoding")
    leader = engine.add(prompt, WISH, take=Take(1, 77))
    pair.until(lambda: leader.takes is None)
    assert (leader.state, leader.has_prompt, leader.cached_count) == ("waiting", False, 0)
    follower = engine.add(prompt, WISH, leader=leader)
    pair.run()
    assert leader.output == follower.output == V4.told(2 * PAGE + 1)


def test_followers_wait_for_a_leader_that_begins_again() -> None:
    pair = pair_of(pools={"lines": 4})
    pair.uid = 3
    leader = pair.take(LINE[:300], WISH)
    follower = pair.take(LINE[:300], WISH, leader=leader)
    pair.until(lambda: leader.state == "landing")
    pair.clock.advance(6.0)
    pair.run()
    assert leader.output == follower.output == V4.told(300)
    assert_free(pair.decode)


def test_an_engine_without_a_port_hands_nothing_over() -> None:
    pair = pair_of()
    with pair.decode.offload as offload:
        engine = Engine(world.tiny(), offload, EngineConfig())
        with pytest.raises(BadInput, match="takes part in no handoffs"):
            engine.add(LINE[:10], WISH, give=1)
