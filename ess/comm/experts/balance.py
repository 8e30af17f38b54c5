"""Places the experts of a layer so that all ranks have about equal work. Needs no torch.

As DeepSeek's EPLB does it, without its groups: places beyond one per expert go, one by one, to the
expert whose copies have the most work each. Then all copies, the busiest first, go to the least
busy rank with a free place. Copies of an expert share its tokens evenly (`placement`), so they must
be on different ranks: two on one rank would not relieve any rank.

Why every copy finds a rank. If all ranks with a free place already have the expert, some full rank
lacks it, as an expert has at most as many copies as there are ranks. That full rank has an expert
which a rank with a free place lacks: moving this expert there makes room.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ess.errors import BadInput

Shares = tuple[tuple[int, ...], ...]


def check_places(expert_count: int, rank_count: int, redundant: int) -> None:
    """BadInput unless every rank can have equally many places, and no expert twice."""
    total, most = expert_count + redundant, expert_count * (rank_count - 1)
    if rank_count < 1 or redundant < 0 or redundant > most:
        raise BadInput(
            f"redundant_experts is {redundant}, must be 0 to {most} for {expert_count} experts on"
            f" {rank_count} ranks: no rank has an expert twice"
        )
    if total % rank_count:
        also = f" and {redundant} redundant ones" if redundant else ""
        raise BadInput(
            f"{expert_count} experts{also} cannot be shared equally by {rank_count} ranks:"
            f" redundant_experts may be {redundant + -total % rank_count}"
        )


def balanced(loads: Sequence[float], rank_count: int, redundant: int = 0) -> Shares:
    """The experts of each rank, ascending; `loads` is the work for each expert.

    >>> balanced([90, 10, 10, 10], 2, redundant=2)
    ((0, 1, 2), (0, 1, 3))
    """
    check_places(len(loads), rank_count, redundant)
    counts = copy_counts(loads, rank_count, redundant)
    each = [load / count for load, count in zip(loads, counts, strict=True)]
    ranks = _Ranks(each, rank_count, (len(loads) + redundant) // rank_count)
    for expert in sorted(range(len(loads)), key=lambda expert: (-each[expert], expert)):
        for _ in range(counts[expert]):
            ranks.add(expert)
    return tuple(tuple(sorted(own)) for own in ranks.own)


def copy_counts(loads: Sequence[float], rank_count: int, redundant: int) -> list[int]:
    """How many copies each expert gets."""
    counts = [1] * len(loads)
    queue = [(-load, expert) for expert, load in enumerate(loads)] if rank_count > 1 else []
    heapq.heapify(queue)
    for _ in range(redundant):
        _, expert = heapq.heappop(queue)
        counts[expert] += 1
        if counts[expert] < rank_count:
            heapq.heappush(queue, (-loads[expert] / counts[expert], expert))
    return counts


def rank_loads(places: Shares, loads: Sequence[float]) -> list[float]:
    """The work of each rank."""
    counts = [0] * len(loads)
    for own in places:
        for expert in own:
            counts[expert] += 1
    return [sum(loads[expert] / counts[expert] for expert in own) for own in places]


def balance(places: Shares, loads: Sequence[float]) -> float:
    """A rank's average work as a share of the busiest rank's: 1 if all have the same.

    >>> balance(((0, 1), (2, 3)), [90, 10, 10, 10])
    0.6
    """
    each = rank_loads(places, loads)
    return sum(each) / len(each) / max(each) if any(each) else 1.0


class _Ranks:
    """The experts of each rank so far. `each` is the work for one copy of each expert."""

    def __init__(self, each: Sequence[float], rank_count: int, place_count: int) -> None:
        self.own: list[set[int]] = [set() for _ in range(rank_count)]
        self._each = each
        self._place_count = place_count
        self._loads = [0.0] * rank_count

    def add(self, expert: int) -> None:
        free = [rank for rank, own in enumerate(self.own) if len(own) < self._place_count]
        fit = [rank for rank in free if expert not in self.own[rank]]
        if not fit:
            fit = [self._make_room(expert, free)]
        self._put(expert, min(fit, key=lambda rank: (self._loads[rank], rank)))

    def _make_room(self, expert: int, free: Sequence[int]) -> int:
        """Moves an expert from a full rank without `expert` to a free place, and returns that rank.
        Of all such moves, chooses the move after which the busier of the two ranks has least
        work."""
        moves = [
            (
                max(
                    self._loads[to] + self._each[moved],
                    self._loads[rank] - self._each[moved] + self._each[expert],
                ),
                rank,
                to,
                moved,
            )
            for rank, own in enumerate(self.own)
            if expert not in own
            for to in free
            for moved in own - self.own[to]
        ]
        _, rank, to, moved = min(moves)
        self.own[rank].remove(moved)
        self._loads[rank] -= self._each[moved]
        self._put(moved, to)
        return rank

    def _put(self, expert: int, rank: int) -> None:
        assert expert not in self.own[rank], f"rank {rank} has expert {expert} twice"
        self.own[rank].add(expert)
        self._loads[rank] += self._each[expert]
