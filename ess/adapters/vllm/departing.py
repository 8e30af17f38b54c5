"""In each of vLLM's workers: sends computed rows to the decode worker, layer by layer.

vLLM's thread says what each step brings (`begin`), which layer is queued (`layer_made`) and that
the step is queued (`step_made`). These calls only take notes: on a device the kernels of a layer
have not run yet. A thread of ESS waits for them, copies pages into staging and sends them; it also
receives messages of decode workers while vLLM is idle. One lock guards all of it.

Each request leaves from one rank, as all ranks have the same latents. The other ranks report at
once that they have sent it.

Blocks are read under the lock, and never after `begin` has said that they are given up, which is
before vLLM writes into them again. Rows already sent stay right: they are of the same prompt.

An error that the thread does not expect, such as no memory on a device that vLLM has filled, ends
what it does: it is logged, all handoffs of this rank end, peers lose this rank, and vLLM gets its
blocks back. vLLM goes on; of each later request a warning says that its rows do not leave.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.adapters.vllm.blocks import BlockReader, place_of
from ess.adapters.vllm.meeting import MeetingPlace
from ess.adapters.vllm.outbox import Leaving, Outbox
from ess.adapters.vllm.requests import Order, Reached, StepOrders
from ess.adapters.vllm.settings import Ranks, Settings
from ess.errors import BadState
from ess.layout import ModelLayout

LOG: Final = logging.getLogger(__name__)

BUSY_S: Final = 0.001
IDLE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class _Note:
    """The rows of these layers and requests, each up to a token, are there once the event has
    passed. `finished` names a request whose prompt is complete and whose blocks vLLM keeps."""

    layers: range = range(0)
    stops: tuple[tuple[Leaving, int], ...] = ()
    event: torch.cuda.Event | None = None
    finished: str = ""

    @property
    def is_there(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


class Departing:
    def __init__(
        self, layout: ModelLayout, settings: Settings, ranks: Ranks, *, rank: int, block_rows: int
    ) -> None:
        self._layout = layout
        self._settings = settings
        self._ranks = ranks
        self._rank = rank
        self._block_rows = block_rows
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._outbox: Outbox | None = None
        self._meeting: MeetingPlace | None = None
        self._thread: threading.Thread | None = None
        self._device: torch.device | None = None
        self._stops: tuple[tuple[Leaving, int], ...] = ()
        self._notes: deque[_Note] = deque()
        self._sent: set[str] = set()
        self._fault = ""

    # ---- vLLM's thread

    def register(self, tensors: Mapping[str, Tensor]) -> None:
        """From here on decode workers can connect to this rank."""
        if self._outbox is not None:
            raise BadState("vLLM registers its caches a second time")
        settings = self._settings
        reader = BlockReader(self._layout, tensors)
        port = self._ranks.port(settings.transfer_port, self._rank)
        self._outbox = Outbox(reader, settings, port=port, block_rows=self._block_rows)
        device = next(iter(tensors.values())).device
        self._device = device if device.type == "cuda" else None
        self._meeting = MeetingPlace(
            host=settings.peers_host,
            port=self._ranks.port(settings.peers_port, self._rank),
            meet=self._exchange_metadata,
        )
        self._thread = threading.Thread(target=self._run, name="ess-departing", daemon=True)
        self._thread.start()

    @property
    def reached(self) -> Reached:
        assert self._meeting is not None, "vLLM registers its caches before it asks for us"
        return Reached(epoch=self._open.epoch, port=self._meeting.port)

    def begin(self, step: StepOrders) -> None:
        """Before a step: notes that earlier steps are queued, and stops reading blocks given up."""
        self._note(range(self._layout.layer_total))
        with self._lock:
            if self._fault:
                self._refuse(step)
                return
            for name in (*step.given_up, *step.preempted):
                self._open.give_up(name)
            mine = [(self._open.order(order), order.stop) for order in self._own_orders(step)]
            self._stops = tuple((leaving, stop) for leaving, stop in mine if leaving is not None)
            for name in step.finished:
                if self._open.has(name):
                    self._notes.append(_Note(finished=name))
                else:
                    self._sent.add(name)

    def _refuse(self, step: StepOrders) -> None:
        """Nothing leaves any more: vLLM need not keep blocks."""
        self._sent.update(step.finished)
        for order in self._own_orders(step):
            if order.prompt:
                LOG.warning("request %s does not leave: %s", order.name, self._fault)

    def layer_made(self, name: str) -> None:
        layer = place_of(name, self._layout).layer
        self._note(range(layer, layer + 1))

    def step_made(self) -> None:
        """Some vLLM versions call this before the MTP layers run: those wait for the next step."""
        self._note(range(self._layout.layer_count))

    def ended(self) -> set[str]:
        """Finished requests whose blocks vLLM may reuse, each returned once."""
        with self._lock:
            gone, self._sent = self._sent, set()
        return gone

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._meeting is not None:
            self._meeting.close()
        if self._outbox is not None:
            self._outbox.close()

    def _note(self, layers: range) -> None:
        """Takes no lock: vLLM must not wait for a copy while it queues its kernels."""
        if self._stops:
            event = None
            if self._device is not None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._notes.append(_Note(layers, self._stops, event))

    def _own_orders(self, step: StepOrders) -> list[Order]:
        return [order for order in step.orders if self._ranks.source(order.uid) == self._rank]

    @property
    def _open(self) -> Outbox:
        assert self._outbox is not None, "vLLM registers its caches before its first step"
        return self._outbox

    # ---- threads of ESS

    def _exchange_metadata(self, metadata: bytes) -> bytes:
        with self._lock:
            return self._open.met(metadata)

    def _run(self) -> None:
        try:
            self._send_on()
        except Exception as fault:
            self._fail(fault)

    def _fail(self, fault: Exception) -> None:
        LOG.error("rank %d sends no more rows until vLLM starts again", self._rank, exc_info=fault)
        with self._lock:
            self._fault = f"its rank has failed: {type(fault).__name__}: {fault}"
            finished = {note.finished for note in self._notes if note.finished}
            self._sent |= finished | self._open.abandon()
            self._stops = ()
            self._notes.clear()
        assert self._meeting is not None, "peers can be met before the thread starts"
        self._meeting.close()

    def _send_on(self) -> None:
        """Runs copies on a stream of their own, after the event of what they copy."""
        with contextlib.ExitStack() as stack:
            if self._device is not None:
                torch.cuda.set_device(self._device)
                side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(side))
            while not self._over.wait(BUSY_S if self._open.is_busy else IDLE_S):
                self.pump()

    def pump(self) -> None:
        """Sends the rows whose events have passed; acts on what peers say."""
        with self._lock:
            while self._notes and self._notes[0].is_there:
                note = self._notes[0]
                for leaving, stop in note.stops:
                    self._open.made(leaving, note.layers, stop)
                if note.finished:
                    self._open.finish(note.finished)
                self._notes.popleft()
            self._open.pump()
            self._sent |= self._open.gone()
