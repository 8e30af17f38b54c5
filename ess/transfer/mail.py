"""Messages of this worker to its peers: sealed, and posted over its transport."""

from __future__ import annotations

from ess.transfer.messages import Message, Seal
from ess.transfer.transport import Transfer, Transport


class Mail:
    """Messages may be lost: a sender repeats what matters, or gives up at a deadline."""

    def __init__(self, transport: Transport, seal: Seal, *, within_s: float = 10.0) -> None:
        self._transport = transport
        self._seal = seal
        self._within_s = within_s

    def sealed(self, message: Message, peer: int) -> bytes:
        """A message for this peer alone, to be posted with the bytes of a transfer."""
        return self._seal.sealed(message, sender=self._transport.epoch, receiver=peer)

    def post(self, message: Message, peer: int) -> None:
        sealed = self.sealed(message, peer)
        self._transport.post(Transfer(peer=peer, notification=sealed, within_s=self._within_s))
