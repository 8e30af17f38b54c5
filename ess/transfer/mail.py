"""What a worker reaches its peers by: a transport, the seal of its messages, and a clock."""

from __future__ import annotations

from dataclasses import dataclass

from ess.clock import Clock
from ess.errors import BadInput
from ess.transfer.messages import Message, Seal
from ess.transfer.transport import Transfer, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """Messages may be lost: a sender repeats what matters, or gives up at a deadline. A message, a
    transfer and a silent peer each have `wait_s`."""

    transport: Transport
    seal: Seal
    clock: Clock
    wait_s: float

    def __post_init__(self) -> None:
        if not 0 < self.wait_s < float("inf"):
            raise BadInput(f"wait_s is {self.wait_s}, must be a number of seconds above 0")

    def now_s(self) -> float:
        return self.clock.now_s()

    def sealed(self, message: Message, peer: int) -> bytes:
        """A message for this peer alone, to be posted with the bytes of a transfer."""
        return self.seal.sealed(message, sender=self.transport.epoch, receiver=peer)

    def post(self, message: Message, peer: int) -> None:
        sealed = self.sealed(message, peer)
        self.transport.post(Transfer(peer=peer, notification=sealed, within_s=self.wait_s))
