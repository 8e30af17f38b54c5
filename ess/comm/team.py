"""A team: the ranks that share one stage. Every member makes the same calls in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ess.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class PendingParts(Protocol):
    """An exchange under way: what the other members send, while the caller goes on."""

    def wait(self) -> Tensor:
        """Waits for the parts of all members, in rank order: the caller's own bytes. Only once."""


class Team(Protocol):
    """When a member is lost, the others' next call raises LinkLost."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None: ...

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """All members' tensors joined along `dim` in rank order; they may differ only along `dim`.

        The result is the caller's own. `sizes` are all members' sizes along `dim`: a caller that
        knows them saves a round.
        """

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sends tensor i to member i; returns the tensors that came, by member.

        Tensors may differ in size, not in dtype or number of dimensions.
        """

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        """Begins to send: of the flat `content` the first `given[0]` bytes go to member 0, the next
        `given[1]` to member 1, and so on. `due[i]` bytes come from member i; both sides know it.

        Several exchanges may be under way. All members begin them in the same order and use the
        team for nothing else until they have waited for all of them, in any order. Until then
        `content` must not change.
        """

    def spread(self, content: Tensor) -> PendingParts:
        """Begins to send the flat bytes of `content` to every member: all send equally many, and
        all know how many. Otherwise like `start`."""

    def check(self) -> None:
        """LinkLost if a member is lost. What came from a device's exchange counts only if this
        passes when the host has waited for it: a lost member's exchange ends with bytes that mean
        nothing.
        """

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        """The root's bytes; other members' `content` is ignored."""


def check_parts(team: Team, content: Tensor, given: Sequence[int], due: Sequence[int]) -> None:
    """BadInput before anything is sent."""
    if len(given) != team.size or len(due) != team.size or min(*given, *due) < 0:
        raise BadInput(
            f"given {[*given]} and due {[*due]} must have a size for each of {team.size} members"
        )
    if content.dim() != 1 or content.element_size() != 1 or len(content) != sum(given):
        raise BadInput(
            f"content has the shape {tuple(content.shape)}, {sum(given)} bytes are given"
        )
    if given[team.rank] != due[team.rank]:
        raise BadInput(f"member {team.rank} gives itself {given[team.rank]}, not {due[team.rank]}")


class ReadyParts:
    """An exchange whose content is already here."""

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

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        return ReadyParts(content)

    def spread(self, content: Tensor) -> PendingParts:
        return ReadyParts(content)

    def check(self) -> None:
        return

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        return content


class WrappedTeam:
    """A team that passes calls on to another."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self.rank, self.size = team.rank, team.size

    def barrier(self) -> None:
        self._team.barrier()

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        return self._team.all_gather(tensor, dim, sizes=sizes)

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._team.all_to_all(tensors)

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        return self._team.start(content, given, due)

    def spread(self, content: Tensor) -> PendingParts:
        return self._team.spread(content)

    def check(self) -> None:
        self._team.check()

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        return self._team.broadcast(content, root)
