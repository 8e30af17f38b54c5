"""A link between two processes: heads over a `Wire`, tensors over torch.distributed.

The sender writes a head, with the shape of the tensor, and posts the tensor. A thread of the
receiver reads heads; a head tells it whether a tensor comes and how large, and it receives the
tensor into one of `held + 1` berths: one lent to the caller, the others full or free. Then it
answers TAKEN. So data moves while both sides compute, sizes are checked before they are used, and
the sender counts what is taken, which gloo does not know.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ess.comm.ending import Ending
from ess.comm.link import (
    AHEAD_MAX,
    HELD_MAX,
    PATIENCE_S,
    Frame,
    LinkLost,
    check_frame,
    left,
    took_nothing,
)
from ess.comm.processes.control import SENTENCE_BYTES_MAX, Kind, Wire
from ess.comm.processes.tensors import SHAPE_BYTES, TensorWay, as_bytes, pack_shape, unpack_shape
from ess.errors import BadInput, BadState

CLOSE_S: Final = 2.0
WAKE_S: Final = 0.2
_FAIL: Final = Struct("<i")
_BEAT: Final = Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The peer of a link, and the limits on frames under way to it."""

    peer: int
    name: str
    device: torch.device
    ahead: int = AHEAD_MAX
    held: int = HELD_MAX
    patience_s: float = PATIENCE_S


@dataclass(slots=True)
class Heard:
    """What this rank knows from the peer's heartbeats. Times are those of time.monotonic()."""

    progress: int = 0
    heard_s: float = field(default_factory=time.monotonic)
    moved_s: float = field(default_factory=time.monotonic)

    def beat(self, progress: int) -> None:
        if progress != self.progress:
            self.progress, self.moved_s = progress, self.heard_s


@dataclass(slots=True, eq=False)
class Sent:
    """A frame that the peer has not taken; `settle` waits for the posted tensor."""

    settle: Callable[[], object] | None = None


class Berths:
    """Memory that tensors arrive in: `count` pieces, each as large as its largest tensor so far."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._free: deque[tuple[Tensor, torch.cuda.Event | None]] = deque(
            (torch.empty(0, dtype=torch.uint8, device=device), None) for _ in range(count)
        )

    def take(self, size: int) -> Tensor:
        berth, is_read = self._free.popleft()
        if is_read is not None:
            is_read.synchronize()
        if berth.numel() < size:
            berth = torch.empty(size, dtype=torch.uint8, device=self._device)
            if self._device.type == "cuda":  # its memory may be that of kernels still in the queue
                torch.cuda.current_stream(self._device).synchronize()
        return berth

    def give(self, berth: Tensor) -> None:
        """Takes a berth back. Kernels that the caller has started may still read it."""
        is_read = None
        if self._device.type == "cuda":
            is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_read.record(torch.cuda.current_stream(self._device))
        self._free.append((berth, is_read))


class WiredLink:
    """`outward` and `inward` are the ways that tensors go and come, if they do.

    The ways keep the store of the meeting alive, so a closed link drops them.
    """

    def __init__(
        self,
        wire: Wire,
        terms: Terms,
        ending: Ending,
        *,
        outward: TensorWay | None = None,
        inward: TensorWay | None = None,
    ) -> None:
        self.peer = terms.peer
        self.heard = Heard()
        self._wire = wire
        self._terms = terms
        self._outward, self._inward = outward, inward
        self._ending = ending
        self._changed = threading.Condition()
        self._queue: deque[tuple[Frame, Tensor | None]] = deque()
        self._sent: deque[Sent] = deque()
        self._berths = Berths(terms.held + 1 if inward else 0, terms.device)
        self._lent: Tensor | None = None
        self._has_left = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._read, name=f"from {terms.name}", daemon=True)
        ending.register(tell=self._tell, wake=self._wake)

    def start(self) -> None:
        self.heard = Heard()
        self._thread.start()

    @property
    def is_deaf(self) -> bool:
        """Whether the peer's silence has a reason: it has left, we have, or our queue is full."""
        return self._has_left or self._is_closed or len(self._queue) >= self._terms.held

    def send(self, head: bytes, tensor: Tensor | None = None) -> None:
        check_frame(head, tensor, has_tensors=self._outward is not None)
        if tensor is not None and tensor.device != self._terms.device:
            raise BadInput(f"tensor is on {tensor.device}, the link on {self._terms.device}")
        shape = pack_shape(tensor)
        self._wait_taken(self._terms.ahead - 1)
        if self._has_left:
            raise left(self.peer, self._terms.name)
        try:
            self._post(shape + head, tensor)
        except (OSError, RuntimeError) as wrong:
            self._fail(wrong)
            self._ending.check()

    def flush(self) -> None:
        self._wait_taken(0)

    def receive(self, timeout_s: float | None = 0.0) -> Frame | None:
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            self._check()
            if not self._queue and self._has_left:
                raise left(self.peer, self._terms.name)
            if not self._queue:
                return None
            frame, berth = self._queue.popleft()
            if self._lent is not None:
                self._berths.give(self._lent)
            self._lent = berth
            self._changed.notify_all()
        return frame

    def close(self) -> None:
        self.leave()
        self.part(time.monotonic() + CLOSE_S)

    def leave(self) -> None:
        """Says goodbye when the peer has taken everything."""
        if self._is_closed:
            return
        try:
            self.flush()
            self._is_closed = True
            self._wire.try_write(Kind.BYE)
        except LinkLost:
            self._is_closed = True
        self._wire.end_writing()

    def part(self, until_s: float) -> None:
        """Ends the connection when the peer has said goodbye too, at the latest at `until_s`."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        self._wire.cut()
        if self._thread.is_alive():
            self._wake()
        self._thread.join(WAKE_S)
        self._wire.close()
        self._outward = self._inward = None

    def beat(self, progress: int) -> None:
        if not self._has_left and not self._is_closed:
            self._wire.try_write(Kind.BEAT, _BEAT.pack(progress))

    def _post(self, head: bytes, tensor: Tensor | None) -> None:
        sent = Sent()
        with self._changed:
            self._sent.append(sent)
        self._wire.write(Kind.FRAME, head)
        if tensor is not None and tensor.numel():
            assert self._outward is not None, "check_frame has let a tensor pass"
            sent.settle = self._outward.post(as_bytes(tensor))

    def _wait_taken(self, most: int) -> None:
        """Waits until at most `most` frames are under way."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: len(self._sent) <= most or self._is_over(), self._terms.patience_s
            )
        self._check()
        if self._has_left and len(self._sent) > most:
            raise left(self.peer, self._terms.name)
        if not came:
            lost = took_nothing(self.peer, self._terms.name, self._terms.patience_s)
            self._ending.fail(lost)
            self._ending.check()

    def _has_news(self) -> bool:
        return bool(self._queue) or self._is_over()

    def _is_over(self) -> bool:
        return self._has_left or self._is_closed or self._ending.lost is not None

    def _check(self) -> None:
        self._ending.check()
        if self._is_closed:
            raise BadState(f"the link to {self._terms.name} is closed")

    def _read(self) -> None:
        try:
            while not self._has_left:
                message = self._wire.read()
                if message is None:
                    raise ConnectionResetError("the end of the stream")
                self.heard.heard_s = time.monotonic()
                self._act(message.kind, message.body)
        except Exception as wrong:
            if not self._is_closed:
                self._fail(wrong)

    def _act(self, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.FRAME:
                self._take(body)
            case Kind.TAKEN:
                self._conclude()
            case Kind.BEAT:
                self.heard.beat(_unpack_beat(body))
            case Kind.FAIL:
                self._ending.fail(_unpack_fail(body))
            case Kind.BYE:
                with self._changed:
                    self._has_left = True
                    self._changed.notify_all()
            case _:
                raise BadInput(f"a {kind.name} in the middle of a group's life")

    def _take(self, body: bytes) -> None:
        if len(body) < SHAPE_BYTES:
            raise BadInput(f"a frame of {len(body)} bytes, at least {SHAPE_BYTES}")
        shape = unpack_shape(body[:SHAPE_BYTES])
        if shape is not None and self._inward is None:
            raise BadInput(f"a tensor of {shape} over a link that carries none")
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < self._terms.held or self._is_over())
        if self._is_over():
            return
        tensor, berth = self._received(*shape) if shape is not None else (None, None)
        with self._changed:
            self._queue.append((Frame(body[SHAPE_BYTES:], tensor), berth))
            self._changed.notify_all()
        self._wire.write(Kind.TAKEN)

    def _received(self, dtype: torch.dtype, sizes: list[int]) -> tuple[Tensor, Tensor]:
        count = torch.Size(sizes).numel() * dtype.itemsize
        with self._changed:
            berth = self._berths.take(count)
        if count:
            assert self._inward is not None, "a tensor over a link that carries none"
            self._inward.receive(berth[:count], self._is_over)
        return berth[:count].view(dtype).view(sizes), berth

    def _conclude(self) -> None:
        """The peer has taken the oldest frame under way: its memory is the sender's again."""
        with self._changed:
            if not self._sent:
                raise BadInput("a frame was taken that was never sent")
            sent = self._sent[0]
        if sent.settle is not None:
            sent.settle()
        with self._changed:
            self._sent.popleft()
            self._changed.notify_all()

    def _fail(self, wrong: Exception) -> None:
        cause = "a tensor broke off" if isinstance(wrong, RuntimeError) else str(wrong)
        if isinstance(wrong, ConnectionError):
            cause = "its connection ended without a goodbye"
        lost = LinkLost(self.peer, f"{self._terms.name} is lost: {cause}")
        lost.__cause__ = wrong
        self._ending.fail(lost)

    def _tell(self, lost: LinkLost) -> None:
        """Tells the peer; a peer that does not read is cut off, so that nothing waits for it."""
        if not self._is_closed and not self._wire.try_write(Kind.FAIL, _pack_fail(lost)):
            self._wire.cut()

    def _wake(self) -> None:
        inward = self._inward
        if inward is not None:
            inward.wake()
        with self._changed:
            self._changed.notify_all()


def _unpack_beat(body: bytes) -> int:
    if len(body) != _BEAT.size:
        raise BadInput(f"a beat of {len(body)} bytes, {_BEAT.size} expected")
    return int(_BEAT.unpack(body)[0])


def _pack_fail(lost: LinkLost) -> bytes:
    return _FAIL.pack(lost.rank) + str(lost).encode()[:SENTENCE_BYTES_MAX]


def _unpack_fail(body: bytes) -> LinkLost:
    if len(body) < _FAIL.size:
        raise BadInput(f"a failure in {len(body)} bytes")
    (rank,) = _FAIL.unpack_from(body)
    return LinkLost(rank, body[_FAIL.size :].decode(errors="replace"))
