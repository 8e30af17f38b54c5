"""A team: the ranks that share one stage. Every member makes the same calls in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Team(Protocol):
    """A member that is lost raises LinkLost in the others' next call."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """All members' tensors joined along `dim` in rank order; only along `dim` may they differ.

        The result is the caller's own. `sizes` are those of all members along `dim`: a caller who
        knows them saves a round.
        """

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sends the i-th tensor to member i; returns what came, the i-th from member i.

        Tensors may differ in size, not in dtype or number of dimensions.
        """

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        """The root's bytes; those of the others are not looked at."""


class OneTeam:
    rank = 0
    size = 1

    def barrier(self) -> None:
        return

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        return tensor

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        return content
