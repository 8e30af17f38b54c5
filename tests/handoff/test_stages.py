"""Prompts whose layers come from several workers land whole, bit for bit, or do not land."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ess.door.handoff.endings import Landed, Lapsed, Missed, Sent
from ess.errors import BadInput
from ess.transfer.messages import Piece, PieceKind, Reason, Reserved
from ess.transfer.transport import Transfer
from tests.handoff.receiving import SEAL, content
from tests.handoff.tier import SPLITS, TOKENS, UID, Tier, same_windows, tier, windows_of
from tests.support.few import pairs

KINDS = ("inprocess", "tcp", "shared", "unguarded")


@pytest.fixture(params=KINDS)
def two(request: pytest.FixtureRequest) -> Iterator[Tier]:
    with tier(request.param) as made:
        yield made


def landed(made: Tier, uid: int = UID) -> Landed:
    made.turn(lambda: bool(made.came))
    outcome = made.came.pop()
    assert isinstance(outcome, Landed), outcome
    assert outcome.uid == uid
    return outcome


def missed(made: Tier) -> Missed:
    made.turn(lambda: bool(made.came))
    outcome = made.came.pop()
    assert isinstance(outcome, Missed), outcome
    return outcome


@pytest.mark.parametrize(*pairs(first=("prefill", "decode"), split=(*SPLITS,), kind=KINDS))
def test_a_prompt_lands_bit_for_bit(kind: str, split: str, first: str) -> None:
    with tier(kind, split) as made:
        if first == "prefill":
            made.give()
        sequence = made.want()
        if first == "decode":
            made.settle()
            made.give()
        outcome = landed(made)
        assert content(sequence) == made.expected()
        assert same_windows(outcome.windows, windows_of(TOKENS, made.layout), len(TOKENS) - 1)
        names = [name for name, _ in outcome.timeline.marks]
        assert names[-2:] == ["complete", "landed"]
        sequence.resume()
        sequence.warm_from(*outcome.windows)
        sequence.fill()
        total = made.layout.layer_total
        assert [made.offload.verify(layer) for layer in range(total)] == [[]] * total
        made.turn(lambda: made.is_idle)
        assert [stage.closed for stage in made.stages] == [[UID]] * len(made.stages)
        assert [type(end) for stage in made.stages for end in stage.left] == [Sent] * len(
            made.stages
        )
        got = made.port.counts
        sent = sum(stage.port.counts.sent_bytes for stage in made.stages)
        assert (got.landed_count, got.missed_count, got.again_count, got.refused_count) == (
            1,
            0,
            0,
            0,
        )
        assert got.received_bytes == sent
        made.check()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_legs_may_come_in_any_order(order: tuple[int, ...]) -> None:
    """A leg that is whole is settled with its worker; nothing is marked before the last one is."""
    with tier("inprocess", "four") as made:
        sequence = made.want()
        for place, number in enumerate(order):
            assert made.came == []
            assert made.is_blank(sequence)
            made.stages[number].give(whole=made.layout)
            made.settle()
            done = {n for n, stage in enumerate(made.stages) if stage.closed}
            assert done == set(order[: place + 1])
        outcome = landed(made)
        assert content(sequence) == made.expected()
        assert same_windows(outcome.windows, windows_of(TOKENS, made.layout), len(TOKENS) - 1)


def test_only_what_is_not_cached_goes_over(two: Tier) -> None:
    for uid, page_count in ((1, 5), (2, 2)):
        two.give(uid)
        sequence = two.want(uid)
        before = two.port.counts.received_bytes
        landed(two, uid)
        paged = page_count * two.layout.host_page_bytes
        assert paged < two.port.counts.received_bytes - before < paged + 1000
        assert content(sequence) == two.expected()
        sequence.close()
        two.turn(lambda: two.is_idle)
        for stage in two.stages:
            stage.close(uid)
    two.check()


def test_several_prompts_land_at_once(two: Tier) -> None:
    texts = {uid: (uid, *TOKENS[1 : 60 * uid]) for uid in (1, 2, 3, 4)}
    opened = {uid: two.want(uid, text) for uid, text in texts.items()}
    for stage, uids in zip(two.stages, [(1, 2, 3, 4), (4, 2, 1, 3)], strict=True):
        for uid in uids:
            stage.give(uid, texts[uid], whole=two.layout)
    two.turn(lambda: len(two.came) == 4)
    assert all(isinstance(outcome, Landed) for outcome in two.came)
    for uid, sequence in opened.items():
        assert content(sequence) == two.expected(texts[uid])
    two.turn(lambda: two.is_idle)
    two.check()


@pytest.mark.parametrize("token_count", [1, 2, 64, 65, 512])
def test_prompts_of_any_length(token_count: int) -> None:
    """The longest one, with as many windows as there can be, fills the room for windows."""
    tokens = tuple(range(token_count))
    with tier("inprocess", "four", arrivals_max=1) as made:
        windows = windows_of(tokens, made.layout, window_count=32)
        sequence = made.want(UID, tokens)
        for stage in made.stages:
            stage.offer(UID, tokens)
            stage.made(UID, 0, token_count - 1)
            stage.finish(UID, windows)
        outcome = landed(made)
        assert content(sequence) == made.expected(tokens)
        assert same_windows(outcome.windows, windows, token_count - 1)
        made.check()


def test_the_latest_windows_of_all_stages_are_the_same() -> None:
    """A stage that has fewer than another has its latest ones."""
    with tier("inprocess") as made:
        windows = windows_of(TOKENS, made.layout)
        made.want()
        for stage, count in zip(made.stages, (4, 2), strict=True):
            stage.offer()
            stage.made(UID, 0, 299)
            stage.finish(UID, windows[:, 4 - count :])
        sets, count = landed(made).windows
        assert count == 4
        fewer = windows.copy()
        fewer[made.stages[1].groups, :2] = -1
        assert same_windows((sets, count), fewer, 299)


def test_a_stage_without_windows_leaves_its_groups_cold(two: Tier) -> None:
    windows = windows_of(TOKENS, two.layout)
    two.want()
    for stage, given in zip(two.stages, (None, windows), strict=True):
        stage.offer()
        stage.made(UID, 0, 299)
        stage.finish(UID, given)
    sets, count = landed(two).windows
    assert count == 4
    cold = [len(positions) == 0 for positions, _ in sets]
    assert cold == [group < two.stages[1].groups.start for group in range(two.layout.group_count)]


def test_the_lead_may_have_any_of_the_layers() -> None:
    with tier("inprocess", "four") as made:
        made.stages = [made.stages[number] for number in (2, 0, 3, 1)]
        made.meet()
        sequence = made.want()
        made.give()
        outcome = landed(made)
        assert content(sequence) == made.expected()
        assert same_windows(outcome.windows, windows_of(TOKENS, made.layout), len(TOKENS) - 1)


# ---- one leg is missed


def half_made(made: Tier) -> None:
    """Some pages of each stage have come."""
    for stage in made.stages:
        stage.offer()
        stage.made(UID, 0, 200)
    before = made.port.counts.received_bytes
    made.turn(lambda: made.port.counts.received_bytes > before)
    made.settle()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stage_killed_in_the_middle_ends_the_handoff(two: Tier, victim: int) -> None:
    free = two.free_count
    sequence = two.want()
    half_made(two)
    gone, other = two.stages[victim], two.stages[1 - victim]
    gone.kill()
    outcome = missed(two)
    assert f"peer {gone.epoch:016x} is lost" in outcome.sentence
    assert two.is_blank(sequence)
    two.turn(lambda: bool(other.left))
    assert other.left[0].reason is Reason.ABORTED
    assert other.closed == [], "its prompt is still being made"
    other.made(UID, 200, 299)
    other.finish(UID, None)
    two.turn(lambda: other.closed == [UID])
    sequence.close()
    assert two.free_count == free
    assert two.port.peers() == []
    with pytest.raises(BadInput, match="is not connected"):
        two.want()
    two.check()


@pytest.mark.parametrize("kind", ["inprocess", "tcp"])
def test_a_restarted_group_is_another_one_and_serves(kind: str) -> None:
    with tier(kind) as made:
        first = made.want()
        half_made(made)
        old = made.lead
        for stage in made.stages:
            stage.kill()
        missed(made)
        made.start()
        assert made.lead != old
        assert [line.epoch for line in made.port.peers()] == [made.lead]
        made.port.receiver.expect(first, uid=UID, peer=made.lead)
        made.give()
        landed(made)
        assert content(first) == made.expected()
        fresh = made.offload.open([7, 8, 9], on_device=False)
        with pytest.raises(BadInput, match=f"peer {old:016x} is not connected"):
            made.port.receiver.expect(fresh, uid=6, peer=old)
        made.check()


def test_one_restarted_stage_makes_it_another_group(two: Tier) -> None:
    """Under the same lead: the receiver expects nothing from the former stage any more."""
    two.stages[1].kill()
    two.turn(lambda: two.port.peers() == [])
    two.stages[1] = two._stage(1)
    two.meet()
    sequence = two.want()
    two.give()
    landed(two)
    assert content(sequence) == two.expected()


def test_a_stopped_stage_is_missed_when_it_was_silent_for_too_long(two: Tier) -> None:
    sequence = two.want()
    half_made(two)
    stopped, other = two.stages
    stopped.is_alive = False
    two.turn(lambda: bool(two.came), advance_s=0.5)
    outcome = two.came.pop()
    assert isinstance(outcome, Missed)
    assert f"peer {stopped.epoch:016x}" in outcome.sentence
    assert two.is_blank(sequence)
    two.turn(lambda: bool(other.left))
    sequence.close()
    two.check()


def test_a_refusal_by_one_stage_is_told_in_words(two: Tier) -> None:
    sequence = two.want()
    two.stages[0].give(whole=two.layout)
    two.stages[1].give(UID, (9, *TOKENS[1:]), whole=two.layout)
    outcome = missed(two)
    assert outcome.sentence == f"peer {two.stages[1].epoch:016x} refuses it: wrong text"
    assert two.is_blank(sequence)


def test_rows_of_layers_of_another_end_the_handoff(two: Tier) -> None:
    sequence = two.want()
    two.stages[0].give(whole=two.layout)
    impostor = two.stages[1]
    two.settle()
    piece = Piece(UID, PieceKind.ROWS, 0, 1, 0, 4, 4 * two.layout.page_bytes, 0)
    frame = SEAL.sealed(piece, sender=impostor.epoch, receiver=two.port.epoch)
    impostor.transport.post(Transfer(peer=two.port.epoch, notification=frame, within_s=9.0))
    outcome = missed(two)
    assert outcome.sentence.startswith(
        f"layers 0..0 of ROWS, which another worker has, from peer {impostor.epoch:016x}"
    )
    assert two.is_blank(sequence)
    two.check()


# ---- it is given up


@pytest.mark.parametrize(
    *pairs(
        moment=range(12), who=("decode", "first", "last"), kind=("inprocess", "unguarded", "tcp")
    )
)
def test_it_may_be_given_up_at_any_moment(kind: str, who: str, moment: int) -> None:
    """By the worker that takes or a stage: pages, places and prompts are all free again."""
    with tier(kind, "four") as made:
        free = made.free_count, [stage.free_count for stage in made.stages]
        sequence = made.want()
        giver = {"decode": None, "first": made.stages[0], "last": made.stages[-1]}[who]
        for number, act in enumerate(acts(made)):
            if number == moment:
                give_up(made, giver)
            act()
            made.step()
        made.turn(lambda: made.is_idle, advance_s=0.3)
        if giver is None:
            assert made.came == []
        else:
            (outcome,) = made.came
            is_landed = isinstance(outcome, Landed)
            assert is_landed or isinstance(giver.left[0], Lapsed)
            assert content(sequence) == made.expected() if is_landed else made.is_blank(sequence)
        for stage in made.stages:
            is_made = stage.opened[UID].state == "preempted"
            assert stage.closed == ([UID] if is_made else [])
            assert is_made or stage is giver
            stage.opened[UID].close()
        sequence.close()
        for owner in (made, *made.stages):
            owner.offload.forget_prefixes()
        assert (made.free_count, [stage.free_count for stage in made.stages]) == free
        made.check()


def acts(made: Tier) -> list:
    """What stages do with a prompt, chunk by chunk and stage by stage."""
    listed = [stage.offer for stage in made.stages]
    for first, stop in ((0, 100), (100, 299)):
        listed += [lambda s=stage, a=first, b=stop: go_on(s, a, b) for stage in made.stages]
    return listed


def go_on(stage, first: int, stop: int) -> None:
    if stage.opened[UID].state == "active":
        stage.made(UID, first, stop)
        if stop == 299 and UID in stage.port.sender._open:
            stage.finish(UID, None)


def give_up(made: Tier, giver) -> None:
    if giver is None:
        made.port.receiver.give_up(UID)
    else:
        giver.port.sender.give_up(UID)


def test_unguarded_pages_rest_until_every_stage_has_settled() -> None:
    with tier("unguarded") as made:
        free = made.free_count
        sequence = made.want()
        half_made(made)
        made.stages[1].is_alive = False
        made.port.receiver.give_up(UID)
        sequence.close()
        made.settle()
        assert made.free_count == free - 5, "one stage may still write there"
        assert len(made.port.receiver) == 1
        made.stages[1].is_alive = True
        made.turn(lambda: made.free_count == free)
        assert made.came == []
        made.check()


def test_more_than_may_arrive_at_once_are_counted_by_handoff() -> None:
    with tier("inprocess", "four", arrivals_max=2) as made:
        for uid in (1, 2):
            made.want(uid, (uid, *TOKENS[1:]))
        sequence = made.offload.open(list(TOKENS), on_device=False)
        with pytest.raises(Exception, match="all 2 handoffs that may arrive"):
            made.port.receiver.expect(sequence, uid=3, peer=made.lead)
        made.port.receiver.give_up(1)
        made.port.receiver.expect(sequence, uid=3, peer=made.lead)
        made.give(3)
        landed(made, 3)
        made.check()


def test_each_stage_is_told_of_a_room_of_its_own() -> None:
    """The pages are the same, tickets and places of windows are not."""
    with tier("inprocess", "four") as made:
        entry = made.port.receiver.expect(
            made.offload.open(list(TOKENS), on_device=False), uid=UID, peer=made.lead
        )
        rooms = [leg.room for leg in entry.legs]
        assert all(isinstance(room, Reserved) for room in rooms)
        assert len({room.pages for room in rooms}) == 1
        assert len({room.ticket for room in rooms}) == 4
        assert len({room.window_at for room in rooms}) == 4
        sizes = np.diff([room.window_at for room in rooms])
        assert (sizes > 0).all()
