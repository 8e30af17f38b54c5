"""Which groups of workers are met: those that have each layer once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ess.door.handoff.geometry import part_layers, shares, wire_layers
from ess.door.handoff.incoming.leg import Leg
from ess.door.handoff.incoming.origins import Origins
from ess.door.handoff.port import PEERS_MAX
from ess.errors import BadInput
from ess.transfer.arrivals import Arrival
from ess.transfer.members import Member, joined
from ess.transfer.messages import Again, Piece, PieceKind, Reserved, new_epoch
from tests.handoff.receiving import SEAL
from tests.handoff.tier import WIDE, tier
from tests.transfer.rigs import identity


def origins(*ranges: tuple[int, int]):
    listed = [Member(n + 1, b"", range(*layers)) for n, layers in enumerate(ranges)]
    return Origins(WIDE).of(listed)


def test_each_layer_once_in_any_order() -> None:
    met = origins((3, 6), (6, 8), (0, 3))
    assert [(each.layers, each.groups) for each in met] == [
        (range(3, 6), range(2, 3)),
        (range(6, 8), range(3, 5)),
        (range(3), range(2)),
    ]
    (whole,) = Origins(WIDE).of([Member(1, b"")])
    assert (whole.layers, whole.groups) == (range(8), range(5))


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([(0, 3), (6, 8)], r"no worker has layers 3\.\.5: peer 0000000000000001 0\.\.2, peer"),
        ([(1, 8)], r"no worker has layers 0\.\.0"),
        ([(3, 8)], r"no worker has layers 0\.\.2"),
        ([(0, 3), (3, 7)], r"no worker has layers 7\.\.7"),
        ([(0, 6), (3, 8)], r"two workers have layers 3\.\.5"),
        ([(0, 8), (3, 6)], r"two workers have layers 3\.\.5"),
        ([(0, 8), (0, 8)], r"two workers have layers 0\.\.7"),
        ([(0, 3), (3, 9)], r"peer 0000000000000002 has layers 3\.\.8, of 8 that there are"),
        ([(0, 4), (4, 8)], r"peer 0000000000000001 has layers 0\.\.3, of groups .* 0\.\.5"),
    ],
)
def test_other_groups_are_refused_by_name(ranges: list, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        origins(*ranges)


@pytest.mark.parametrize(
    ("kind", "layers", "owners"),
    [
        (PieceKind.ROWS, (3, 6), [2]),
        (PieceKind.ROWS, (4, 5), [2]),
        (PieceKind.ROWS, (2, 6), []),
        (PieceKind.ROWS, (3, 7), []),
        (PieceKind.INDEX_KEYS, (2, 3), [2]),
        (PieceKind.INDEX_KEYS, (3, 5), [3]),
        (PieceKind.INDEX_KEYS, (1, 3), []),
        (PieceKind.WINDOWS, (0, 1), [1, 2, 3]),
    ],
)
def test_a_piece_is_of_those_that_have_its_layers(kind, layers, owners) -> None:
    piece = Piece(1, kind, *layers, 0, 1, 8, 0)
    assert [each.peer for each in origins((0, 3), (3, 6), (6, 8)) if each.has(piece)] == owners


@pytest.mark.parametrize(
    ("kind", "wired", "own"),
    [
        (PieceKind.ROWS, (3, 6), range(3)),
        (PieceKind.ROWS, (4, 6), range(1, 3)),
        (PieceKind.ROWS, (2, 5), range(2)),
        (PieceKind.ROWS, (0, 3), range(0)),
        (PieceKind.INDEX_KEYS, (2, 3), range(1)),
        (PieceKind.INDEX_KEYS, (0, 2), range(0)),
    ],
)
def test_a_stage_finds_its_own_layers_among_those_asked_for_again(kind, wired, own) -> None:
    stage = WIDE.part(3, 6)
    assert part_layers(stage, kind, range(*wired)) == own
    wide = range(wired[1] - len(own), wired[1])
    assert not own or wire_layers(stage, kind, own) == wide


@pytest.mark.parametrize(("first_page", "pages"), [(1, [(1, 3)]), (3, [])])
def test_layers_without_keys_and_pages_that_are_there_are_not_asked_for(first_page, pages) -> None:
    listed = shares(WIDE, range(1, 3), range(0), first_page=first_page, token_count=130)
    asked = list(Arrival(uid=1, sender=2, shares=listed).missing())
    assert asked[:-1] == [Again(1, PieceKind.ROWS, 1, 3, *each) for each in pages]
    assert asked[-1] == Again(1, PieceKind.WINDOWS, 0, 1, 0, 1)


def test_a_silent_peer_is_asked_less_and_less_often_until_a_part_comes() -> None:
    (origin,) = origins((0, 8))
    room = Reserved(1, 1, 130, b"", 0, 4, 0, (1, 2, 3))
    leg = Leg(origin, room, Arrival(uid=1, sender=1, shares=[]), nag_s=1.0)
    said = [(leg.nag_s, leg.nagged(leg.nag_s)) for _ in range(5)]
    assert said == [(1.0, True), (3.0, True), (7.0, True), (15.0, False), (23.0, False)]
    leg.moved(24.0)
    assert [(leg.nag_s, leg.nagged(leg.nag_s)) for _ in range(2)] == [(25.0, True), (27.0, True)]


def test_of_a_group_that_has_lost_a_member_the_others_are_known() -> None:
    made = Origins(WIDE)
    for lead in (4, 1):
        made.met(made.of([Member(lead, b"", range(3)), Member(lead + 1, b"", range(3, 8))]))
    made.lost(2)
    assert [made.find(lead) is None for lead in (1, 4)] == [True, False]
    assert [peer for peer in range(7) if made.knows(peer)] == [1, 4, 5]


def hellos(made) -> list[bytes]:
    return [stage.port.metadata() for stage in made.stages]


def test_a_group_with_wrong_layers_is_not_met() -> None:
    with tier("inprocess", "four") as made:
        before = made.port.peers()
        first, *others = hellos(made)
        others = [(hello, made.stages[n + 1].layers) for n, hello in enumerate(others)]
        for layers in (range(3), range(2, 4)):
            with pytest.raises(BadInput, match="peer"):
                made.port.meet(joined(SEAL, [(first, layers), *others]))
        with pytest.raises(BadInput, match=r"no worker has layers 0\.\.0"):
            made.port.meet(joined(SEAL, others))
        assert made.port.peers() == before


def test_a_member_with_other_rows_keeps_the_group_away() -> None:
    """Those that were connected before it are not any more, if they were not met before."""
    with tier("inprocess") as made:
        fresh = [made.ends.end() for _ in range(2)]
        other = replace(identity(layout=b"x" * 32), seal=SEAL).hello()
        listed = [(fresh[0].metadata(), range(2)), (other, range(2, 4))]
        with pytest.raises(BadInput, match="has layout"):
            made.port.meet(joined(SEAL, listed))
        assert fresh[0].epoch not in made.port._transport._names
        lead = (made.stages[0].port.metadata(), made.stages[0].layers)
        with pytest.raises(BadInput, match="has layout"):
            made.port.meet(joined(SEAL, [lead, (other, range(2, 4))]))
        sequence = made.want()
        made.give()
        made.turn(lambda: bool(made.came))
        assert sequence.length == 299, "the group that was met before is met still"


def test_a_stage_is_no_worker_by_itself() -> None:
    """Its epoch is known, and nothing is expected of it alone."""
    with tier("inprocess") as made:
        sequence = made.offload.open([1, 2, 3], on_device=False)
        with pytest.raises(BadInput, match="is not connected; 1 peers are"):
            made.port.receiver.expect(sequence, uid=1, peer=made.stages[1].epoch)


def test_to_meet_a_group_again_changes_nothing() -> None:
    with tier("inprocess", "four") as made:
        made.want()
        made.give()
        made.clock.advance(2)
        assert [line.heard_s_ago for line in made.port.peers()] == [2]
        made.meet()
        assert [(line.epoch, line.heard_s_ago) for line in made.port.peers()] == [(made.lead, 0)]
        made.turn(lambda: bool(made.came))
        made.turn(lambda: made.is_idle)
        assert made.port.counts.landed_count == 1


def test_a_group_is_as_silent_as_its_most_silent_member() -> None:
    with tier("inprocess") as made:
        made.want()
        made.clock.advance(2)
        made.stages[0].offer()
        made.turn(lambda: made.port._heard_s[made.lead] == 2)
        assert [line.heard_s_ago for line in made.port.peers()] == [2]


def test_peers_are_counted_by_member() -> None:
    with tier("inprocess") as made:
        known = {new_epoch(): 0.0 for _ in range(PEERS_MAX - 3)}
        made.port._heard_s |= known
        made.meet()
        fresh = [made.ends.end() for _ in range(2)]
        listed = [(fresh[0].metadata(), range(2)), (fresh[1].metadata(), range(2, 4))]
        with pytest.raises(BadInput, match=f"at most {PEERS_MAX}"):
            made.port.meet(joined(SEAL, listed))
        for epoch in known:
            del made.port._heard_s[epoch]
