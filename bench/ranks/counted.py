"""A group that counts the bytes of tensors that a rank sends to others.

Other messages between ranks are not counted: orders, heads of frames, free pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ess.comm.group import Beat, Group
from ess.comm.link import Frame, Link
from ess.comm.team import PendingParts, Team


class CountedTeam:
    def __init__(self, team: Team) -> None:
        self.rank, self.size = team.rank, team.size
        self.sent_bytes = 0
        self._team = team

    def barrier(self) -> None:
        self._team.barrier()

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        self.sent_bytes += tensor.nbytes * (self.size - 1)
        return self._team.all_gather(tensor, dim, sizes=sizes)

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        self.sent_bytes += sum(each.nbytes for each in tensors) - tensors[self.rank].nbytes
        return self._team.all_to_all(tensors)

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        self.sent_bytes += sum(given) - given[self.rank]
        return self._team.start(content, given, due)

    def spread(self, content: Tensor) -> PendingParts:
        self.sent_bytes += len(content) * (self.size - 1)
        return self._team.spread(content)

    def check(self) -> None:
        self._team.check()

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        return self._team.broadcast(content, root)


class CountedLink:
    def __init__(self, link: Link) -> None:
        self.peer = link.peer
        self.sent_bytes = 0
        self._link = link

    def send(self, head: bytes, tensor: Tensor | None = None) -> None:
        self.sent_bytes += 0 if tensor is None else tensor.nbytes
        self._link.send(head, tensor)

    def flush(self) -> None:
        self._link.flush()

    def receive(self, timeout_s: float | None = 0.0) -> Frame | None:
        return self._link.receive(timeout_s)

    def close(self) -> None:
        self._link.close()


class CountedGroup:
    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.team = CountedTeam(group.team)
        self.next = None if group.next is None else CountedLink(group.next)
        self.previous = group.previous
        self.reports: Mapping[int, Link] = group.reports
        self._group = group

    @property
    def next_bytes(self) -> int:
        """Bytes sent to the next stage."""
        return 0 if self.next is None else self.next.sent_bytes

    def advance(self) -> None:
        self._group.advance()

    def beats(self) -> Mapping[int, Beat]:
        return self._group.beats()

    def fail(self, sentence: str) -> None:
        self._group.fail(sentence)

    def close(self) -> None:
        self._group.close()
