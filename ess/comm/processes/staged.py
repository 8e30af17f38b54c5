"""Tensors of a device over links that carry tensors of the host.

For stages that share a device, and where there is no NCCL. A tensor is copied to page-locked memory
on a stream of its own, behind what has made it, and its frame goes when the copy has landed: at the
next call that comes then. So the host does not wait, and the device goes on with the next chunk.
A frame waits for those before it. What comes is copied to page-locked memory by the host, and from
there to the device on the stream of the caller.

Why nothing is overwritten on its way: the tensor that leaves is kept until its copy has landed, and
each copy is memory of its own, which the link keeps until the peer has taken it. What comes is out
of the link's memory when `receive` returns, and torch lends page-locked memory to others only when
the device has read it.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ess.comm.group import Group, WrappedGroup
from ess.comm.link import Frame, Link, LinkLost, check_frame
from ess.errors import BadInput

SOON_S: Final = 0.001
LEAVING_MAX: Final = 2
"""Frames whose tensors are on their way to the host; another one waits for the first of them."""

Cuda: Any = torch.cuda


@dataclass(frozen=True, slots=True, eq=False)
class _Leaving:
    """`source` is kept until its copy in `staged` has landed."""

    head: bytes
    staged: Tensor | None = None
    source: Tensor | None = None
    landed: Any = None

    @property
    def is_staged(self) -> bool:
        return self.landed is None or bool(self.landed.query())


class StagedLink:
    """While frames leave on the link `beside` it, nothing is awaited here longer than `SOON_S`."""

    def __init__(
        self, link: Link, device: torch.device, *, beside: StagedLink | None = None
    ) -> None:
        self.peer = link.peer
        self._beside = beside
        self._link = link
        self._device = device
        self._stream = Cuda.Stream(device)
        self._leaving: deque[_Leaving] = deque()

    @property
    def is_leaving(self) -> bool:
        """Whether frames wait for their tensors."""
        return bool(self._leaving)

    def send(self, head: bytes, tensor: Tensor | None = None) -> None:
        check_frame(head, tensor, has_tensors=True)
        if tensor is not None and tensor.device != self._device:
            raise BadInput(f"tensor is on {tensor.device}, the link's on {self._device}")
        while len(self._leaving) >= LEAVING_MAX:
            self._post()
        self._leaving.append(_Leaving(head) if tensor is None else self._copied(head, tensor))
        self.forward()

    def forward(self) -> None:
        """Sends what has come to the host."""
        while self._leaving and self._leaving[0].is_staged:
            self._post()

    def flush(self) -> None:
        while self._leaving:
            self._post()
        self._link.flush()

    def receive(self, timeout_s: float | None = 0.0) -> Frame | None:
        """The tensor is the caller's own."""
        if timeout_s is not None and self._beside is not None and self._beside.is_leaving:
            timeout_s = min(timeout_s, SOON_S)
        frame = self._link.receive(timeout_s)
        if frame is None or frame.tensor is None:
            return frame
        staged = torch.empty(frame.tensor.shape, dtype=frame.tensor.dtype, pin_memory=True)
        staged.copy_(frame.tensor)
        return replace(frame, tensor=staged.to(self._device, non_blocking=True))

    def close(self) -> None:
        self.flush()
        self._link.close()

    def _copied(self, head: bytes, tensor: Tensor) -> _Leaving:
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(Cuda.current_stream(self._device))
        with Cuda.stream(self._stream):
            staged.copy_(tensor, non_blocking=True)
            landed = Cuda.Event()
            landed.record(self._stream)
        return _Leaving(head, staged, tensor, landed)

    def _post(self) -> None:
        """The first frame, once its tensor is here."""
        leaving = self._leaving[0]
        if leaving.landed is not None:
            leaving.landed.synchronize()
        self._leaving.popleft()
        self._link.send(leaving.head, leaving.staged)


class StagedGroup(WrappedGroup):
    """A group whose neighbours exchange tensors of a device in this way."""

    next: StagedLink | None
    previous: StagedLink | None

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self.next = None if group.next is None else StagedLink(group.next, device)
        self.previous = (
            None if group.previous is None else StagedLink(group.previous, device, beside=self.next)
        )

    def advance(self) -> None:
        super().advance()
        if self.next is not None:
            self.next.forward()

    def close(self) -> None:
        if self.next is not None:
            with suppress(LinkLost):
                self.next.flush()
        super().close()
