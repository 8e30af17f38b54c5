"""Over NIXL: RDMA where there is RDMA, one copy by the kernel on one machine, TCP elsewhere.

How the library behaves, and how this module deals with it:
- it raises where its documents promise a status: every call is guarded, and becomes Failed;
- a killed peer is an error at once, a stopped one never: deadlines and heartbeats are ours;
- its progress thread spins: it is off, and asking for notifications makes progress;
- a transfer that cannot be cancelled at its deadline may still write: `guards` is false;
- it logs to standard output and changes a global logging setting: both are undone;
- an agent's name is the boot epoch, so a restarted worker is another agent;
- the data path has no key: use a private interface (UCX_NET_DEVICES), register pools only.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct, error
from typing import Any, Final

import numpy as np

from ess.clock import Clock
from ess.errors import BadInput, not_installed
from ess.transfer.endpoint import HEARTBEAT_S, Endpoint, Identity
from ess.transfer.messages import Heartbeat
from ess.transfer.runs import Region, Runs, fault_of
from ess.transfer.transport import Event, Transfer

MODULES: Final = ("nixl_cu13._api", "nixl_cu12._api")
CONTENT: Final = b"N"
BEAT: Final = b"B"

_COUNT: Final = Struct("<I")
_REGION: Final = Struct("<QQQ")


def nixl_api() -> Any:
    """The library; Unavailable with what to install if it is missing."""
    raising = logging.raiseExceptions
    for name in MODULES:
        try:
            api = importlib.import_module(name)
        except ImportError:
            continue
        logging.raiseExceptions = raising
        logging.getLogger("nixl").setLevel(logging.WARNING)
        return api
    raise not_installed("NIXL", extra="nixl")


@dataclass(slots=True)
class _Peer:
    addresses: dict[int, tuple[int, int]]
    heard_s: float | None = None
    sent_s: float = 0.0


class NixlTransport(Endpoint):
    guards = False

    def __init__(self, identity: Identity, *, clock: Clock | None = None) -> None:
        super().__init__(identity, clock=clock)
        api = nixl_api()
        config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False)
        self._agent = api.nixl_agent(_name(identity.epoch), config)
        self._looked_s = self._clock.now_s()
        self._peers: dict[int, _Peer] = {}
        self._requests: dict[int, Any] = {}
        self._stuck: list[Any] = []
        self._registered: list[Any] = []
        self._beat_count = 0

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        rows = [(region.address, region.memory.size, 0, "") for region in regions]
        self._registered.append(self._agent.register_memory(rows, "DRAM"))

    def metadata(self) -> bytes:
        regions = self._regions.values()
        table = b"".join(
            _REGION.pack(region.number, region.address, region.memory.size) for region in regions
        )
        address = _COUNT.pack(len(regions)) + table + self._agent.get_agent_metadata()
        return self._identity.hello(address=address)

    def connect(self, metadata: bytes) -> int:
        self._check_open()
        envelope, hello = self._identity.greeted(metadata)
        peer = envelope.sender
        if peer not in self._peers:
            addresses, agent = _read_address(hello.address)
            wrong = self._trouble(lambda: self._agent.add_remote_agent(agent))
            if wrong is None:
                self._peers[peer] = _Peer(addresses)
            else:
                self._underway.lost(peer, wrong)
        return peer

    def poll(self) -> list[Event]:
        self._check_open()
        self._hear()
        for handle in list(self._requests):
            self._ask(handle)
        for handle, transfer in self._underway.late():
            self._underway.fail(handle, f"not done within {transfer.within_s} s")
            self._retire(handle)
        self._watch()
        return self._underway.events()

    def disconnect(self, peer: int) -> None:
        for handle in self._underway.of_peer(peer):
            self._underway.fail(handle, f"we disconnected from {peer:016x}")
            self._retire(handle)
        if self._peers.pop(peer, None) is not None:
            self._trouble(lambda: self._agent.remove_remote_agent(_name(peer)))

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        for request in self._stuck:
            self._trouble(request.release)
        for registered in self._registered:
            self._trouble(partial(self._agent.deregister_memory, registered))
        self._registered.clear()
        self._stuck.clear()
        self._agent = None
        self._is_closed = True

    def _start(self, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        peer = self._peers.get(transfer.peer)
        if peer is None:
            self._underway.fail(handle, f"peer {transfer.peer:016x} is not connected")
            return
        sizes = {number: size for number, (_, size) in peer.addresses.items()}
        fault = fault_of(remote, sizes)
        if fault is not None:
            self._underway.fail(handle, f"refused: {fault}")
        elif len(local):
            self._guarded(handle, lambda: self._request(handle, transfer, local, remote))
        else:
            content = CONTENT + transfer.notification
            self._guarded(handle, lambda: self._agent.send_notif(_name(transfer.peer), content))
            self._underway.complete(handle)

    def _request(self, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        ours = {number: region.address for number, region in self._regions.items()}
        theirs = {
            number: address for number, (address, _) in self._peers[transfer.peer].addresses.items()
        }
        request = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(_descriptors(local, ours), "DRAM"),
            self._agent.get_xfer_descs(_descriptors(remote, theirs), "DRAM"),
            _name(transfer.peer),
            CONTENT + transfer.notification if transfer.notification else b"",
        )
        self._requests[handle] = request
        self._settle(handle, self._agent.transfer(request))

    def _ask(self, handle: int) -> None:
        request = self._requests.get(handle)
        if request is not None:
            self._guarded(
                handle, lambda: self._settle(handle, self._agent.check_xfer_state(request))
            )

    def _settle(self, handle: int, state: str) -> None:
        if state == "DONE":
            self._underway.complete(handle)
            self._retire(handle)
        elif state != "PROC":
            self._underway.fail(handle, f"NIXL says {state}")
            self._retire(handle)

    def _guarded(self, handle: int, call: Callable[[], object]) -> None:
        transfer = self._underway.find(handle)
        wrong = self._trouble(call)
        if wrong is None or transfer is None:
            return
        self._underway.fail(handle, wrong)
        self._retire(handle)
        if "Disconnect" in wrong:
            self._lose(transfer.peer, wrong)

    def _trouble(self, call: Callable[[], object]) -> str | None:
        """The message of what the library raised: its exceptions share no base but Exception."""
        try:
            call()
        except Exception as wrong:
            return f"{type(wrong).__name__}: {wrong}"[:300]
        return None

    def _retire(self, handle: int) -> None:
        request = self._requests.pop(handle, None)
        if request is not None and self._trouble(request.release) is not None:
            self._stuck.append(request)

    def _hear(self) -> None:
        heard: dict[str, list[bytes]] = {}
        self._trouble(lambda: heard.update(self._agent.get_new_notifs()))
        for name, contents in heard.items():
            epoch = _epoch(name)
            if epoch in self._peers:
                self._peers[epoch].heard_s = self._clock.now_s()
            for content in contents:
                if content[:1] == CONTENT and epoch:
                    self._underway.notified(epoch, content[1:])

    def _watch(self) -> None:
        now_s = self._clock.now_s()
        was_away = now_s - self._looked_s > self._identity.silent_s / 2
        self._looked_s = now_s
        for epoch, peer in list(self._peers.items()):
            if was_away and peer.heard_s is not None:
                peer.heard_s = now_s
            elif peer.heard_s is not None and now_s - peer.heard_s > self._identity.silent_s:
                self._lose(epoch, f"silent for {now_s - peer.heard_s:.1f} s")
            elif now_s - peer.sent_s >= HEARTBEAT_S:
                peer.sent_s = now_s
                self._beat(epoch)

    def _beat(self, peer: int) -> None:
        self._beat_count += 1
        beat = self._identity.seal.sealed(
            Heartbeat(self._beat_count), sender=self.epoch, receiver=peer
        )
        wrong = self._trouble(lambda: self._agent.send_notif(_name(peer), BEAT + beat))
        if wrong is not None:
            self._lose(peer, wrong)

    def _lose(self, peer: int, reason: str) -> None:
        if peer in self._peers:
            handles = self._underway.of_peer(peer)
            self._underway.lost(peer, reason)
            for handle in handles:
                self._retire(handle)
            self.disconnect(peer)


def _name(epoch: int) -> str:
    return f"{epoch:016x}"


def _epoch(name: str) -> int:
    try:
        return int(name, 16)
    except ValueError:
        return 0


def _descriptors(runs: Runs, addresses: dict[int, int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    descriptors = np.zeros((len(runs), 3), np.uint64)
    bases = np.array([addresses[number] for number in runs[:, 0].tolist()], np.uint64)
    descriptors[:, 0] = bases + runs[:, 1].astype(np.uint64)
    descriptors[:, 1] = runs[:, 2]
    return descriptors


def _read_address(address: bytes) -> tuple[dict[int, tuple[int, int]], bytes]:
    try:
        (count,) = _COUNT.unpack_from(address)
        end = _COUNT.size + count * _REGION.size
        rows = list(_REGION.iter_unpack(address[_COUNT.size : end]))
    except error:
        raise BadInput(f"{address[:80]!r} is not an address of a NIXL agent") from None
    return {number: (begin, size) for number, begin, size in rows}, address[end:]
