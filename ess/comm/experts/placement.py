"""Which rank has which experts of a layer. Every rank has equally many places.

An expert may have several places: then each serves a part of its tokens. A token's result does not
depend on the place, as the weights are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from ess.comm.experts.balance import check_places
from ess.errors import BadInput

PLACES_MAX: Final = (1 << 15) - 1
"""The most places of a rank: a place's number travels in 16 bits."""


@dataclass(frozen=True)
class Placement:
    """`places[rank]` are the experts of a rank, in the order in which it keeps them."""

    places: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        counts = {len(own) for own in self.places}
        if len(counts) != 1 or not 0 < min(counts) <= PLACES_MAX:
            raise BadInput(f"ranks have {[len(own) for own in self.places]} places, must be alike")
        present = {expert for own in self.places for expert in own}
        missing = set(range(max(present) + 1)) - present
        if missing or min(present) < 0:
            raise BadInput(f"experts {sorted(missing)[:8]} have no place on any rank")
        for rank, own in enumerate(self.places):
            if len(set(own)) < len(own):
                raise BadInput(f"rank {rank} has an expert twice: {list(own)[:16]}")

    @property
    def rank_count(self) -> int:
        return len(self.places)

    @property
    def place_count(self) -> int:
        """Places of one rank."""
        return len(self.places[0])

    @cached_property
    def expert_count(self) -> int:
        return 1 + max(max(own) for own in self.places)

    def at(self, experts: Tensor, *, first: int) -> Tensor:
        """The place for each of these experts [tokens, per_token], as rank times `place_count` plus
        place. Tokens, numbered from `first` on, take copies in turn."""
        numbers, counts = self.table(experts.device)
        if numbers.shape[1] == 1:
            return numbers[:, 0][experts]
        tokens = torch.arange(first, first + len(experts), device=experts.device)[:, None]
        return numbers[experts, tokens % counts[experts]]

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The places of each expert, ascending, and how many it has. The first call for a device
        waits for it."""
        if device not in self._tables:
            numbers, counts = self._table
            self._tables[device] = numbers.to(device), counts.to(device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        places_of: list[list[int]] = [[] for _ in range(self.expert_count)]
        for rank, own in enumerate(self.places):
            for place, expert in enumerate(own):
                places_of[expert].append(rank * self.place_count + place)
        widest = max(map(len, places_of))
        padded = [[*places, *[places[-1]] * (widest - len(places))] for places in places_of]
        return torch.tensor(padded), torch.tensor([len(places) for places in places_of])


def even(expert_count: int, rank_count: int) -> Placement:
    """Equal runs of consecutive experts, as checkpoints are split (`models.weights.split`).

    >>> even(4, 2).places
    ((0, 1), (2, 3))
    """
    check_places(expert_count, rank_count, 0)
    share = expert_count // rank_count
    return Placement(
        tuple(tuple(range(rank * share, (rank + 1) * share)) for rank in range(rank_count))
    )


@dataclass(frozen=True)
class Places:
    """The placement of every layer: `usual`, except for layers with their own."""

    usual: Placement
    own: Mapping[int, Placement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {_shape(placement) for placement in (self.usual, *self.own.values())}
        if len(shapes) > 1:
            raise BadInput(f"placements have {sorted(shapes)} ranks, places and experts each")

    def of(self, layer: int) -> Placement:
        return self.own.get(layer, self.usual)

    def check_ranks(self, count: int) -> None:
        if self.usual.rank_count != count:
            raise BadInput(f"a placement for {self.usual.rank_count} ranks in a team of {count}")


def _shape(placement: Placement) -> tuple[int, int, int]:
    return placement.rank_count, placement.place_count, placement.expert_count
