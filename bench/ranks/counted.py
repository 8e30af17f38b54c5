"""A group that counts the bytes of tensors that a rank sends to others.

Other messages between ranks are not counted: orders, heads of frames, free pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ess.comm.group import Group, WrappedGroup
from ess.comm.link import Frame, Link
from ess.comm.team import PendingParts, WrappedTeam


class CountedTeam(WrappedTeam):
    sent_bytes = 0

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        self.sent_bytes += tensor.nbytes * (self.size - 1)
        return super().all_gather(tensor, dim, sizes=sizes)

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        self.sent_bytes += sum(each.nbytes for each in tensors) - tensors[self.rank].nbytes
        return super().all_to_all(tensors)

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        self.sent_bytes += sum(given) - given[self.rank]
        return super().start(content, given, due)

    def spread(self, content: Tensor) -> PendingParts:
        self.sent_bytes += len(content) * (self.size - 1)
        return super().spread(content)


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


class CountedGroup(WrappedGroup):
    team: CountedTeam
    next: CountedLink | None

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.team = CountedTeam(group.team)
        self.next = None if group.next is None else CountedLink(group.next)

    @property
    def next_bytes(self) -> int:
        """Bytes sent to the next stage."""
        return 0 if self.next is None else self.next.sent_bytes
