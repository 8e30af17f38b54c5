"""A link: frames between two ranks, in order, each complete or not at all.

A frame is a head (bytes: an order, a report) and perhaps a tensor (a hidden state).

- `send` does not wait while the peer has at most `AHEAD_MAX` frames still to take; a frame is taken
  when it lies in the peer's memory, whether asked for or not. The sender must not change a tensor
  until `flush` has returned.
- A peer holds at most `HELD_MAX` frames that it has taken and that no caller has received; for
  reports `REPORTS_MAX`, so that a stage that reports never waits for a lead that waits for the
  stage.
- Tensors go to the next stage only.
- The tensor of a received frame is lent: it is valid until the next frame is received.
- A lost peer raises LinkLost, as does a peer that takes nothing for `PATIENCE_S`. A peer that has
  left in order counts as lost once its last frame is received. Links are not repaired: the
  group ends and another generation of it is joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ess.errors import BadInput, EssError

if TYPE_CHECKING:
    from torch import Tensor

HEAD_BYTES_MAX: Final = 1 << 20
TENSOR_BYTES_MAX: Final = 4 << 30
DIMS_MAX: Final = 4
AHEAD_MAX: Final = 2
HELD_MAX: Final = 2
REPORTS_MAX: Final = 1024
PATIENCE_S: Final = 60.0


class LinkLost(EssError):
    """A peer, and with it the group, is gone or silent. The sentence names the peer and says why.

    rank    the rank that was lost first, as far as this rank knows
    """

    def __init__(self, rank: int, sentence: str) -> None:
        super().__init__(sentence)
        self.rank = rank


class PeerLeft(LinkLost):
    """The peer has left in order, and everything that it sent has been received."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    head: bytes
    tensor: Tensor | None = None


class Link(Protocol):
    @property
    def peer(self) -> int:
        """The peer's rank in the group."""

    def send(self, head: bytes, tensor: Tensor | None = None) -> None: ...

    def flush(self) -> None:
        """Waits until the peer has taken everything that was sent."""

    def receive(self, timeout_s: float | None = 0.0) -> Frame | None:
        """The next frame, or None when none comes in time; a timeout of None waits for ever."""

    def close(self) -> None:
        """Leaves in order: waits until the peer has taken everything, or is lost."""


def next_frame(link: Link) -> Frame:
    """The next frame, however long it takes. LinkLost if the group ends before."""
    frame = link.receive(None)
    assert frame is not None, "a wait without an end has ended"
    return frame


def name_of(rank: int, team: int) -> str:
    stage, member = divmod(rank, team)
    if team == 1:
        return f"stage {stage} (rank {rank})"
    return f"rank {rank} (member {member} of stage {stage})"


def left(rank: int, name: str) -> PeerLeft:
    return PeerLeft(rank, f"{name} has left the group")


def took_nothing(rank: int, name: str, patience_s: float) -> LinkLost:
    return LinkLost(rank, f"{name} has taken nothing for {patience_s:g} s")


def check_frame(head: bytes, tensor: Tensor | None, *, has_tensors: bool) -> None:
    if len(head) > HEAD_BYTES_MAX:
        raise BadInput(f"head has {len(head)} bytes, at most {HEAD_BYTES_MAX}")
    if tensor is None:
        return
    if not has_tensors:
        raise BadInput(f"tensor of shape {tuple(tensor.shape)}: they go to the next stage only")
    if not 1 <= tensor.dim() <= DIMS_MAX:
        raise BadInput(f"tensor has {tensor.dim()} dimensions, 1 to {DIMS_MAX}")
    if not tensor.is_contiguous():
        raise BadInput(f"tensor of shape {tuple(tensor.shape)} is not contiguous")
    if tensor.nbytes > TENSOR_BYTES_MAX:
        raise BadInput(f"tensor has {tensor.nbytes} bytes, at most {TENSOR_BYTES_MAX}")
