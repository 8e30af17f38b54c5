"""A group in one process means what a group of processes means."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ess.comm.group import Group
from ess.comm.link import AHEAD_MAX, HEAD_BYTES_MAX, HELD_MAX, LinkLost
from ess.comm.local import local_group
from ess.errors import BadInput

JOIN_S = 240.0
"""On a machine that others have, too."""


def each(groups: list[Group], act: Callable[[Group], object]) -> list[object]:
    """Runs `act` in a thread per rank and returns what each has made or raised."""
    results: list[object] = [None] * len(groups)

    def run(group: Group) -> None:
        try:
            results[group.rank] = act(group)
        except Exception as wrong:
            results[group.rank] = wrong

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    return results


def test_a_group_has_links_where_the_map_says() -> None:
    groups = local_group(4, team=2)
    assert [group.next.peer if group.next else None for group in groups] == [2, 3, None, None]
    assert [group.previous.peer if group.previous else None for group in groups] == [
        *(None, None, 0, 1)
    ]
    assert [sorted(group.reports) for group in groups] == [[1, 2, 3], [0], [0], [0]]
    assert [(group.team.rank, group.team.size) for group in groups] == [
        *((0, 2), (1, 2), (0, 2), (1, 2))
    ]


def test_frames_are_copied_and_keep_their_order() -> None:
    first, second = local_group(2)
    sent = torch.arange(6.0).reshape(2, 3)
    first.next.send(b"a", sent)
    first.next.send(b"b")
    sent.zero_()
    frame = second.previous.receive()
    assert frame.head == b"a"
    assert frame.tensor.equal(torch.arange(6.0).reshape(2, 3))
    assert second.previous.receive().head == b"b"
    assert second.previous.receive() is None
    second.reports[0].send(b"r")
    assert first.reports[1].receive(5).head == b"r"


def test_a_lent_tensor_ends_with_the_next_frame() -> None:
    first, second = local_group(2)
    first.next.send(b"", torch.ones(3))
    first.next.send(b"")
    lent = second.previous.receive().tensor
    assert lent.equal(torch.ones(3))
    second.previous.receive()
    assert lent.isnan().all()


def test_a_link_is_bounded() -> None:
    first, second = local_group(2, patience_s=0.05)
    for number in range(HELD_MAX + AHEAD_MAX):
        first.next.send(bytes([number]))
    with pytest.raises(LinkLost, match=r"stage 1 \(rank 1\) has taken nothing for 0.05 s"):
        first.next.send(b"one more")
    with pytest.raises(LinkLost, match="taken nothing"):
        first.next.flush()
    assert second.previous.receive().head == b"\0"


def test_what_a_frame_may_be() -> None:
    first, _ = local_group(2)
    with pytest.raises(BadInput, match=str(HEAD_BYTES_MAX)):
        first.next.send(bytes(HEAD_BYTES_MAX + 1))
    with pytest.raises(BadInput, match="not contiguous"):
        first.next.send(b"", torch.zeros(4, 4).T)
    with pytest.raises(BadInput, match="5 dimensions"):
        first.next.send(b"", torch.zeros(1, 1, 1, 1, 1))


def test_a_failure_wakes_every_rank() -> None:
    groups = local_group(4, team=2)

    def act(group: Group) -> None:
        if group.rank == 3:
            group.fail("rank 3 has no memory left")
        elif group.previous:
            group.previous.receive(None)
        else:
            group.team.barrier()
            group.next.receive(None)

    outcomes = each(groups, act)
    for outcome in outcomes[:3]:
        assert isinstance(outcome, LinkLost)
        assert (outcome.rank, str(outcome)) == (3, "rank 3 has no memory left")


def test_who_leaves_in_order_is_heard_to_the_end() -> None:
    first, second = local_group(2)
    first.next.send(b"stop")
    first.close()
    assert second.previous.receive().head == b"stop"
    with pytest.raises(LinkLost, match=r"stage 0 \(rank 0\) has left the group"):
        second.previous.receive()


def test_beats_count_the_progress() -> None:
    first, second = local_group(2)
    second.advance()
    second.advance()
    assert first.beats()[1].progress == 2
    assert second.beats()[0].progress == 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_team_gathers_exchanges_and_broadcasts(size: int) -> None:
    def act(group: Group) -> None:
        team, rank = group.team, group.team.rank
        for turn in range(20):
            mine = torch.full((2, rank + 1), float(rank + turn))
            joined = team.all_gather(mine, 1)
            parts = [torch.full((2, r + 1), float(r + turn)) for r in range(size)]
            assert joined.equal(torch.cat(parts, 1))
            came = team.all_to_all([torch.full((to + rank,), 10 * rank + to) for to in range(size)])
            assert all(
                part.equal(torch.full((rank + by,), 10 * by + rank)) for by, part in enumerate(came)
            )
            assert team.broadcast(bytes([rank, turn]), size - 1) == bytes([size - 1, turn])
            team.barrier()

    assert each(local_group(size, size), act) == [None] * size


def test_a_size_that_the_team_does_not_divide() -> None:
    with pytest.raises(BadInput, match="size is 3, a positive multiple of the team's 2"):
        local_group(3, 2)
