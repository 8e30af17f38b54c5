"""A team: the ranks that share one stage. Every member makes the same calls in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ess.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Coming(Protocol):
    """What the others send, while the caller goes on."""

    def wait(self) -> Tensor:
        """All of it, the members' parts in rank order: bytes of the caller's own. Once."""


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

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> Coming:
        """Begins to send the first `given[0]` bytes of `content`, which is flat, to member 0, the
        next ones to member 1, and so on; `due[i]` bytes come from member i, and both know it.

        Several may be under way. They are begun in the same order by all members, and nothing else
        is asked of the team until they have been waited for in some order. Until then `content`
        does not change.
        """

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        """The root's bytes; those of the others are not looked at."""


def check_parts(team: Team, content: Tensor, given: Sequence[int], due: Sequence[int]) -> None:
    """BadInput before anything is sent."""
    if len(given) != team.size or len(due) != team.size or min(*given, *due) < 0:
        raise BadInput(f"given is {[*given]}, due {[*due]}: a size for each of {team.size} members")
    if content.dim() != 1 or content.element_size() != 1 or len(content) != sum(given):
        raise BadInput(
            f"content has the shape {tuple(content.shape)}, {sum(given)} bytes are given"
        )
    if given[team.rank] != due[team.rank]:
        raise BadInput(f"member {team.rank} gives itself {given[team.rank]}, not {due[team.rank]}")


class Come:
    """What is here already."""

    def __init__(self, content: Tensor) -> None:
        self._content = content

    def wait(self) -> Tensor:
        return self._content


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

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> Coming:
        return Come(content)

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        return content
