"""The requests that leave from one rank: their pages, the sender of them, the way to the peers.

The sender is that of ESS prefill workers. Only the source of pages differs: they are read from
vLLM's blocks into staging when they are to leave, and stay there until their transfer has ended.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ess.adapters.vllm.blocks import BlockReader, Blocks, CachePlace
from ess.adapters.vllm.requests import Order
from ess.adapters.vllm.settings import Settings
from ess.adapters.vllm.staging import Staging
from ess.clock import RealClock
from ess.door.handoff.endings import HandoffCounts
from ess.door.handoff.outgoing.sender import Sender
from ess.door.handoff.outgoing.units import Part
from ess.errors import BadInput, PoolFull
from ess.layout import ModelLayout
from ess.transfer.endpoint import SILENT_S, Identity
from ess.transfer.mail import Mail
from ess.transfer.messages import layout_hash, new_epoch
from ess.transfer.runs import Runs
from ess.transfer.transport import Completed, Event, Failed, Notification, PeerLost
from ess.transfer.transports.tcp import TcpTransport

LOG: Final = logging.getLogger(__name__)


class BlockPages:
    """The pages of one prompt in vLLM's blocks. `is_closed`: vLLM may have the blocks back."""

    cached_count = 0

    def __init__(self, reader: BlockReader, staging: Staging, *, row_count: int) -> None:
        self.blocks = Blocks(np.empty(0, np.int64), 1)
        self.is_kept = False
        self.is_closed = False
        self.regions = {region.number: region for region in (staging.region(),)}
        self._reader = reader
        self._staging = staging
        self._row_count = row_count

    @property
    def layout(self) -> ModelLayout:
        return self._reader.layout

    def lend(self, part: Part) -> Runs | None:
        if part.unit_count > self._staging.free_count:
            return None
        unit, lent = self._reader.unit_bytes(part.kind), []
        for layer in part.layers:
            place = CachePlace(part.kind, layer)
            pages = self._reader.read(place, self.blocks, part.pages, token_count=self._row_count)
            lent.append(self._staging.runs(self._staging.put(pages), unit))
        return np.concatenate(lent)

    def give_back(self, local: Runs) -> None:
        self._staging.give_back(local)

    def keep(self) -> None:
        self.is_kept = True

    def close(self) -> None:
        self.is_closed = True


@dataclass(slots=True, eq=False)
class Leaving:
    """A request from its first order until vLLM has its blocks back."""

    name: str
    uid: int
    row_count: int
    pages: BlockPages
    blocks: list[int] = field(default_factory=list)
    is_lost: bool = False


class Outbox:
    """The requests that leave. Not to be called by two threads at once."""

    def __init__(
        self, reader: BlockReader, settings: Settings, *, port: int, block_rows: int
    ) -> None:
        self._reader = reader
        self._block_rows = block_rows
        self._staging = Staging(
            slot_bytes=reader.layout.page_bytes, slot_count=settings.staging_pages
        )
        self._seal = settings.seal()
        layout = layout_hash(reader.layout, weights=settings.weights)
        who = Identity(
            epoch=new_epoch(),
            seal=self._seal,
            layout=layout,
            silent_s=max(SILENT_S, settings.wait_s),
        )
        self._transport = TcpTransport(who, host=settings.transfer_host, port=port)
        self._transport.register([self._staging.region()])
        self._sender = Sender(
            reader.layout,
            Mail(
                transport=self._transport,
                seal=self._seal,
                clock=RealClock(),
                wait_s=settings.wait_s,
            ),
            HandoffCounts(),
            length_max=1,
            lease_s=settings.lease_s,
        )
        self._leaving: dict[str, Leaving] = {}

    @property
    def epoch(self) -> int:
        return self._transport.epoch

    @property
    def is_busy(self) -> bool:
        return bool(self._leaving)

    def has(self, name: str) -> bool:
        return name in self._leaving

    def order(self, order: Order) -> Leaving | None:
        """Updates the request; None where it has ended, or cannot leave."""
        leaving = self._begin(order) if order.prompt else self._leaving.get(order.name)
        if leaving is not None:
            leaving.blocks.extend(order.blocks)
            ids = np.array(leaving.blocks, np.int64)
            leaving.pages.blocks = Blocks(ids, self._block_rows)
        return leaving

    def made(self, leaving: Leaving, layers: range, stop: int) -> None:
        if not leaving.is_lost:
            for layer in layers:
                self._sender.made(leaving.uid, layer, min(stop, leaving.row_count))

    def finish(self, name: str) -> None:
        leaving = self._leaving.get(name)
        if leaving is not None and not leaving.pages.is_kept:
            self._sender.finish(leaving.uid, None)

    def give_up(self, name: str) -> None:
        """Gives a request up: vLLM will write other rows into its blocks."""
        leaving = self._leaving.pop(name, None)
        if leaving is not None:
            leaving.is_lost = True
            self._sender.give_up(leaving.uid)

    def gone(self) -> set[str]:
        """Requests whose blocks vLLM has back, each returned once."""
        names = {name for name, leaving in self._leaving.items() if leaving.pages.is_closed}
        for name in names:
            del self._leaving[name]
        return names

    def met(self, metadata: bytes) -> bytes:
        self._transport.connect(metadata)
        return self._transport.metadata()

    def pump(self) -> None:
        for event in self._transport.poll():
            self._handle_event(event)
        self._sender.expire()
        for outcome in self._sender.outcomes():
            LOG.debug("%s", outcome)

    def abandon(self) -> set[str]:
        """Ends all handoffs and the transport: nothing leaves any more. Peers are told, as far as
        what has failed lets us, and see that the connection ends. Returns the requests that vLLM
        has finished and whose blocks it keeps for us: no others, for their blocks are in use."""
        kept = {name for name, leaving in self._leaving.items() if leaving.pages.is_kept}
        with contextlib.suppress(Exception):
            for name in list(self._leaving):
                self.give_up(name)
            self._transport.poll()
        self._leaving.clear()
        self._transport.close()
        return kept

    def close(self) -> None:
        self._transport.close()

    def _begin(self, order: Order) -> Leaving | None:
        pages = BlockPages(self._reader, self._staging, row_count=len(order.prompt) - 1)
        try:
            salt = order.salt.encode()
            self._sender.offer_pages(order.uid, pages, prompt=order.prompt, salt=salt)
        except (BadInput, PoolFull) as wrong:
            LOG.warning("request %s does not leave: %s", order.name, wrong)
            return None
        leaving = Leaving(order.name, order.uid, len(order.prompt) - 1, pages)
        self._leaving[order.name] = leaving
        return leaving

    def _handle_event(self, event: Event) -> None:
        match event:
            case Completed():
                self._sender.completed(event.handle)
            case Failed():
                self._sender.failed(event.handle, event.reason)
            case PeerLost():
                self._sender.peer_lost(event.peer)
            case Notification():
                self._handle_message(event.peer, event.content)

    def _handle_message(self, peer: int, content: bytes) -> None:
        """Passes on messages that are sealed by this very peer; ignores others."""
        try:
            envelope = self._seal.opened(content)
        except BadInput as wrong:
            LOG.warning("peer %016x: %s", peer, wrong)
            return
        if (envelope.sender, envelope.receiver) == (peer, self.epoch):
            self._sender.take(envelope.message, peer=peer)
