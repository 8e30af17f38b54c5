"""Where prompts may come from: a worker that has all layers, or several that have some each.

A group is known by the epoch of its lead, as others speak of it. Its workers have each layer once
between them, or it is not met. One of them is lost: nothing new is expected of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.transfer.members import Member
from ess.transfer.messages import Piece, PieceKind


@dataclass(frozen=True, slots=True)
class Origin:
    """A worker, and the layers, the layer groups and the key layers whose rows, windows and index
    keys come from it."""

    peer: int
    layers: range
    groups: range
    key_layers: range

    def has(self, piece: Piece) -> bool:
        """Whether the piece is of these layers, with any pages, or of no layer."""
        if not piece.kind.is_of_layers:
            return True
        mine = self.layers if piece.kind is PieceKind.ROWS else self.key_layers
        return mine.start <= piece.layer_begin and piece.layer_end <= mine.stop


class Origins:
    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._groups: dict[int, tuple[Origin, ...]] = {}
        self._peers: set[int] = set()

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, members: Sequence[Member]) -> tuple[Origin, ...]:
        """BadInput unless the members have each layer once, and layers of one group together."""
        whole = range(self._layout.layer_total)
        if self._layout.has_states and len(members) > 1:
            raise BadInput(
                f"{len(members)} workers have layers each, and {self._layout.name!r} keeps a state"
                " beside its rows, which one worker brings"
            )
        origins = [self._origin(each.epoch, each.layers or whole) for each in members]
        stop = 0
        for origin in sorted(origins, key=lambda origin: origin.layers.start):
            layers = origin.layers
            if layers.start > stop:
                raise BadInput(
                    f"no worker has layers {stop}..{layers.start - 1}: {_layers_of(origins)}"
                )
            if layers.start < stop:
                twice = f"{layers.start}..{min(stop, layers.stop) - 1}"
                raise BadInput(f"two workers have layers {twice}: {_layers_of(origins)}")
            stop = layers.stop
        if stop != len(whole):
            raise BadInput(f"no worker has layers {stop}..{len(whole) - 1}: {_layers_of(origins)}")
        return tuple(origins)

    def _origin(self, peer: int, layers: range) -> Origin:
        layout = self._layout
        if layers.stop > layout.layer_total:
            raise BadInput(
                f"peer {peer:016x} has layers {layers.start}..{layers.stop - 1}, of "
                f"{layout.layer_total} that there are"
            )
        first, last = layout.place_of(layers.start)[0], layout.place_of(layers.stop - 1)[0]
        begin, end = layout.groups[first][0], layout.groups[last][-1] + 1
        if (begin, end) != (layers.start, layers.stop):
            raise BadInput(
                f"peer {peer:016x} has layers {layers.start}..{layers.stop - 1}, of groups that "
                f"are layers {begin}..{end - 1}"
            )
        groups = range(first, last + 1)
        return Origin(peer, layers, groups, layout.key_layers_of(groups))

    def met(self, group: tuple[Origin, ...]) -> None:
        self._groups[group[0].peer] = group
        self._peers |= {origin.peer for origin in group}

    def find(self, lead: int) -> tuple[Origin, ...] | None:
        return self._groups.get(lead)

    def leads(self) -> dict[int, tuple[Origin, ...]]:
        return dict(self._groups)

    def knows(self, peer: int) -> bool:
        """The peer is met, by itself or as a member of a group."""
        return peer in self._peers

    def lost(self, peer: int) -> None:
        """Nothing more comes from this peer, nor anything new from the group that it is in."""
        for lead, group in list(self._groups.items()):
            if peer in (origin.peer for origin in group):
                del self._groups[lead]
        self._peers.discard(peer)


def _layers_of(origins: Sequence[Origin]) -> str:
    parts = (
        f"peer {each.peer:016x} {each.layers.start}..{each.layers.stop - 1}" for each in origins
    )
    return ", ".join(parts)
