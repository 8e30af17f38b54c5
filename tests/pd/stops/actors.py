"""A worker in a thread of its own, which stands still at the n-th call of its transport.

Threads take turns: a worker moves only while the test waits for it, so a run repeats itself. Where
a worker stands still it is in the middle of a step, as a process is that was stopped: what it has
said is on its way, and what it was about to say is not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from ess.door.handoff.port import Port
from ess.engine.config import EngineConfig
from ess.engine.engine import Engine
from ess.transfer.endpoint import Endpoint, Identity
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from ess.transfer.transports.shared import SharedTransport
from ess.transfer.transports.streams import StreamTransport
from ess.transfer.transports.tcp import TcpTransport
from tests.pd.rigs import LAYOUT, SEAL, Stepped, offload_of
from tests.support.checkpoints import small
from tests.support.manual_clock import ManualClock

TRANSPORTS: Final = ("inprocess", "tcp", "shared")
CALLS: Final = ("post", "poll", "allow", "forbid", "connect")
PATIENCE_S: Final = 120.0
STANDS: Final = object()


class Killed(BaseException):
    """Ends the thread of a worker that is killed, wherever it stands."""


class Watched:
    """A transport that says when a call of it begins and has ended."""

    def __init__(self, inner: Endpoint, say: Callable[[], None]) -> None:
        self._inner = inner
        self._say = say

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name not in CALLS:
            return attribute

        def called(*given: Any) -> Any:
            self._say()
            result = attribute(*given)
            self._say()
            return result

        return called


class Worker(Stepped):
    def __init__(
        self,
        transport: str,
        epoch: int,
        config: EngineConfig,
        *,
        exchange: Exchange,
        clock: ManualClock,
        limit_s: float,
        say: Callable[[], None],
    ) -> None:
        shares = transport == "shared"
        self.offload = offload_of(mtp=config.mtp, clock=clock, shared=shares)
        identity = Identity(epoch=epoch, seal=SEAL, layout=LAYOUT)
        self.transport: Endpoint
        if transport == "inprocess":
            name = f"worker {epoch}"
            self.transport = InProcessTransport(identity, exchange=exchange, name=name, clock=clock)
        else:
            kind = SharedTransport if shares else TcpTransport
            self.transport = kind(identity, clock=clock)
        watched: Any = Watched(self.transport, say)
        limits = {"wait_s": limit_s, "lease_s": limit_s}
        self.port = Port(self.offload, watched, SEAL, clock=clock, **limits)
        self.engine = Engine(small(), self.offload, config, port=self.port, clock=clock)

    def left(self) -> dict[str, object]:
        """What it still has when all requests are over and cached prefixes are forgotten."""
        self.offload.forget_prefixes()
        self.offload.check()
        stats, transport, handoffs = self.offload.stats(), self.transport, self.engine._handoffs
        tables = ("_coming", "_claimed", "_offered", "_told", "_landed")
        kept = {
            "host pages": stats.host_page_count - stats.free_host_page_count,
            "index pages": stats.index_page_count - stats.free_index_page_count,
            "slots": int(stats.used_slot_count.sum()),
            "arrivals": len(self.port.receiver),
            "departures": len(self.port.sender),
            "orphans": [*self.port.sender._orphans._targets],
            "releases": [*self.port._released],
            "tickets": set(transport._tickets),
            "transfers": [*transport._underway._open],
            **{name: [*getattr(handoffs, name)] for name in tables},
        }
        if isinstance(transport, StreamTransport):
            kept["links"] = max(0, len(transport._links) - 2)
        return {name: what for name, what in kept.items() if what}

    def die(self) -> None:
        """What the system does for a process that has ended: it closes what that had open."""
        transport = self.transport
        if isinstance(transport, StreamTransport):
            for link in transport._links:
                link.channel.close()
            transport._listener.close()
        else:
            transport.close()


class Actor:
    """Stands still at point `at`, counted from the moment that it is set; None for no such point.
    A call of the transport has two points, before and behind it."""

    def __init__(self, make: Callable[[Callable[[], None]], Worker]) -> None:
        self.at: int | None = None
        self.stands = False
        self.worker: Worker
        self._count = 0
        self._orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._resumes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        made = self.do(lambda: make(self._point))
        assert isinstance(made, Worker)
        self.worker = made

    def do(self, order: Callable[[], Any]) -> Any:
        """What the order returns; None if the worker stands still, now or before."""
        if self.stands:
            return None
        self._orders.put(order)
        return self._answer()

    def go_on(self) -> None:
        """The order during which it stood still is carried out to its end."""
        self.stands = False
        self._resumes.put(True)
        self._answer()

    def kill(self) -> None:
        assert self.stands, "a worker is killed where it stands"
        self._resumes.put(False)
        self._thread.join(PATIENCE_S)
        self.worker.die()

    def end(self) -> None:
        if self._thread.is_alive():
            self._resumes.put(False)
            self._orders.put(_killed)
            self._thread.join(PATIENCE_S)
            self.worker.transport.close()
        assert not self._thread.is_alive(), "the thread of a worker goes on"

    def _answer(self) -> Any:
        answer = self._answers.get(timeout=PATIENCE_S)
        if isinstance(answer, BaseException):
            raise answer
        self.stands = answer is STANDS
        return None if self.stands else answer

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                self._answers.put(order())
            except Killed:
                return
            except BaseException as error:
                self._answers.put(error)

    def _point(self) -> None:
        if self.at is None:
            return
        self._count += 1
        if self._count == self.at:
            self._answers.put(STANDS)
            if not self._resumes.get():
                raise Killed


def _killed() -> None:
    raise Killed
