"""A team of processes, over collectives of torch.distributed.

Sizes go before contents, unless the caller knows them. A collective that fails, or that another
rank's failure ends, raises LinkLost; a member missing for `patience_s` ends the group.

On a device the host does not wait: a collective is queued behind the current stream, on a stream of
NCCL's own, and `PendingParts.wait` makes the current stream wait for it. So a step's collectives
run beside its compute, and are captured with it. When the group ends they are aborted, and the
device goes on with bytes that mean nothing: a caller asks `check` before it believes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from ess.comm.ending import Ending
from ess.comm.link import DIMS_MAX, HEAD_BYTES_MAX, LinkLost
from ess.comm.processes.tensors import as_bytes, break_waits
from ess.comm.team import PendingParts, check_parts
from ess.errors import BadInput

GRACE_S: Final = 1.0
"""How long a broken exchange waits for a report that names the rank that broke it."""
WHY_MAX: Final = 200
ABORT_S: Final = 5.0
"""How long a team that is left waits for NCCL: a thread in it would abort the interpreter's end."""
_SIZES: Final = DIMS_MAX + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """`host` for all that lies on the host; `tensors` for what lies on the device: the same group
    on a CPU."""

    host: Any
    tensors: Any
    patience_s: float


class WiredParts:
    """An exchange under way; it keeps both sides' memory alive until its end."""

    def __init__(self, team: WiredTeam, work: Any, came: Tensor, content: Tensor) -> None:
        self._team = team
        self._work = work
        self._came = came
        self._content = content

    def wait(self) -> Tensor:
        self._team.end(self._work, self._came)
        return self._came


class WiredTeam:
    def __init__(self, stage: int, collectives: Collectives, ending: Ending) -> None:
        self.rank: int = collectives.host.rank()
        self.size: int = collectives.host.size()
        self._stage = stage
        self._host = collectives.host
        self._tensors = collectives.tensors
        self._patience = timedelta(seconds=collectives.patience_s)
        self._ending = ending
        self._aborting: threading.Thread | None = None
        ending.register(tell=lambda lost: None, wake=self._wake)

    def barrier(self) -> None:
        self._run(lambda: self._host.barrier())

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        if not tensor.is_contiguous():
            raise BadInput(f"tensor of shape {tuple(tensor.shape)} is not contiguous")
        counts = self._counts(tensor.shape[dim]) if sizes is None else list(sizes)
        if len(counts) != self.size or counts[self.rank] != tensor.shape[dim]:
            raise BadInput(f"sizes are {counts}, member {self.rank} has {tensor.shape[dim]}")
        each = tensor.nbytes // max(tensor.shape[dim], 1)
        if not tensor.shape[dim]:
            each = tensor.new_empty(_with_dim(tensor.shape, dim, 1)).nbytes
        lengths = [count * each for count in counts]
        whole = self._gather(as_bytes(tensor), lengths)
        parts = [
            part.view(tensor.dtype).view(_with_dim(tensor.shape, dim, count))
            for part, count in zip(_cut(whole, lengths), counts, strict=True)
        ]
        if dim == 0:
            return whole.view(tensor.dtype).view(_with_dim(tensor.shape, 0, sum(counts)))
        return torch.cat(parts, dim)

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        if len(tensors) != self.size:
            raise BadInput(f"tensors has {len(tensors)} tensors for a team of {self.size}")
        dims = tensors[0].dim()
        if dims > DIMS_MAX or any(tensor.dim() != dims for tensor in tensors):
            raise BadInput(
                f"tensors have {[t.dim() for t in tensors]} dimensions, at most 4, all alike"
            )
        shapes = self._shapes(tensors)
        each = tensors[0].element_size()
        given = [tensor.nbytes for tensor in tensors]
        due = [shape.numel() * each for shape in shapes]
        content = torch.cat([as_bytes(tensor.contiguous()) for tensor in tensors])
        came = self._exchange(content, given, due)
        return [
            part.clone().view(tensors[0].dtype).view(shape)
            for part, shape in zip(_cut(came, due), shapes, strict=True)
        ]

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        check_parts(self, content, given, due)
        came = content.new_empty(sum(due))
        group = self._group_of(content)
        work = self._guarded(lambda: group.alltoall_base(came, content, list(due), list(given)))
        return WiredParts(self, work, came, content)

    def spread(self, content: Tensor) -> PendingParts:
        came, group = content.new_empty(self.size * len(content)), self._group_of(content)
        work = self._guarded(lambda: group._allgather_base(came, content))
        return WiredParts(self, work, came, content)

    def check(self) -> None:
        self._ending.check()

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        if self.rank == root and len(content) > HEAD_BYTES_MAX:
            raise BadInput(f"content has {len(content)} bytes, at most {HEAD_BYTES_MAX}")
        size = torch.tensor([len(content)])
        self._run(lambda: self._host.broadcast(size, root))
        if not 0 <= int(size) <= HEAD_BYTES_MAX:
            raise BadInput(f"content has {int(size)} bytes, at most {HEAD_BYTES_MAX}")
        room = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == root:
            room = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
        if len(room):
            self._run(lambda: self._host.broadcast(room, root))
        return room.numpy().tobytes()

    def _counts(self, count: int) -> list[int]:
        counts = torch.empty(self.size, dtype=torch.int64)
        mine = torch.tensor([count])
        self._run(lambda: self._host._allgather_base(counts, mine))
        return [int(count) for count in counts]

    def _shapes(self, tensors: list[Tensor]) -> list[torch.Size]:
        """The shapes of all tensors that the members send to this member, by sender."""
        mine = torch.zeros(self.size, _SIZES, dtype=torch.int64)
        for to, tensor in enumerate(tensors):
            mine[to, : tensor.dim() + 1] = torch.tensor([tensor.dim(), *tensor.shape])
        came = torch.empty_like(mine)
        self._run(lambda: self._host.alltoall_base(came, mine, [], []))
        return [torch.Size(row[1 : 1 + row[0]]) for row in came.tolist()]

    def _gather(self, content: Tensor, counts: list[int]) -> Tensor:
        whole, group = content.new_empty(sum(counts)), self._group_of(content)
        if len(set(counts)) == 1:
            if counts[0]:
                self.end(self._guarded(lambda: group._allgather_base(whole, content)), whole)
            return whole
        given = [content.numel()] * self.size
        return self._exchange(content.repeat(self.size), given, counts)

    def _exchange(self, content: Tensor, given: list[int], due: list[int]) -> Tensor:
        return self.start(content, given, due).wait()

    def _group_of(self, content: Tensor) -> Any:
        return self._tensors if content.is_cuda else self._host

    def _run(self, begin: Callable[[], Any]) -> None:
        work = self._guarded(begin)
        self._guarded(lambda: work.wait(self._patience))

    def end(self, work: Any, came: Tensor) -> None:
        """Waits for an exchange that has begun; on a device only the current stream does: given a
        limit of time, NCCL's `wait` would make the host wait."""
        self._guarded(work.wait if came.is_cuda else lambda: work.wait(self._patience))

    def _guarded(self, act: Callable[[], Any]) -> Any:
        self._ending.check()
        try:
            return act()
        except RuntimeError as wrong:
            self._ending.wait(GRACE_S)
            why = (str(wrong).strip().splitlines() or [type(wrong).__name__])[-1][:WHY_MAX]
            lost = LinkLost(-1, f"a member of stage {self._stage} is lost: {why}")
            lost.__cause__ = wrong
            self._ending.fail(lost)
            self._ending.check()

    def close(self) -> None:
        """Releases the process groups, and with them the store."""
        host, tensors = self._host, self._tensors
        self._host = self._tensors = None
        if tensors is not host:
            self._abort(tensors)
        if self._aborting is not None:
            self._aborting.join(ABORT_S)

    def _wake(self) -> None:
        if self._host is None:
            return
        break_waits(self._host)
        if self._tensors is not self._host:
            self._abort(self._tensors)

    def _abort(self, group: Any) -> None:
        """Ends what runs on the device at once. Then NCCL waits until all graphs with exchanges are
        gone, so this has a thread of its own."""
        if self._aborting is None:
            self._aborting = threading.Thread(target=group.abort, name="abort", daemon=True)
            self._aborting.start()


def _cut(content: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(torch.split_with_sizes(content, sizes))


def _with_dim(shape: Sequence[int], dim: int, count: int) -> list[int]:
    return [count if at == dim % len(shape) else size for at, size in enumerate(shape)]
