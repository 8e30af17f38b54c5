"""How processes become a group: they meet at the lead's store, then connect to each other.

    store    the lead's, at `init`: the address of every rank; all leave it when all have met
    wires    the higher rank dials the lower: its reports to the lead, its stage to the one before
    ways     a process group of torch.distributed for each direction in which tensors go, and for
             each team; none is the default group, so nothing else in the process is affected
    GO       the lead lets every rank begin when all are fully connected

Ranks that are missing at the deadline are named. Each generation uses its own names in the store,
so that late ranks of another generation do not disturb it.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ess.comm.ending import Ending
from ess.comm.group import Group
from ess.comm.link import AHEAD_MAX, HELD_MAX, PATIENCE_S, REPORTS_MAX, name_of
from ess.comm.processes.control import Ends, Kind, Wire, answer, greet
from ess.comm.processes.joined import JoinedGroup
from ess.comm.processes.members import Collectives, WiredTeam
from ess.comm.processes.pulse import Pulse
from ess.comm.processes.staged import StagedGroup
from ess.comm.processes.tensors import GlooWay, NcclWay, TensorWay, gloo_group, nccl_group
from ess.comm.processes.wired import Terms, WiredLink
from ess.comm.team import OneTeam, Team
from ess.errors import BadInput, BadState, Unavailable

SILENT_S: Final = 3.0
LOOK_S: Final = 0.02
REPORT, STAGE = 0, 1
BY_HOST: Final = "host:"
RANKS_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """This rank, its group, where the group meets, and the deadline."""

    rank: int
    size: int
    team: int
    generation: int
    host: str
    port: int
    is_agents_store: bool
    secret: bytes
    device: torch.device
    timeout_s: float
    patience_s: float
    until_s: float

    @property
    def silent_s(self) -> float:
        """How long a peer may send no heartbeat before it counts as lost. Libraries that compile
        programs for a device, as DeepGEMM does, hold the interpreter's lock meanwhile: no thread of
        such a rank beats."""
        return SILENT_S if self.device.type == "cpu" else max(SILENT_S, self.patience_s)

    @property
    def where(self) -> str:
        return f"generation {self.generation} at {self.host}:{self.port}"

    @property
    def home(self) -> str:
        """Where this rank's tensors are, for the others; without NCCL those of a device go over the
        host, unless a team needs NCCL all the same."""
        is_alone = self.device.type != "cpu" and self.team == 1 and not dist.is_nccl_available()
        return f"{BY_HOST}{self.device}" if is_alone else str(self.device)

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def name(self, rank: int) -> str:
        return name_of(rank, self.team)


def join_group(
    rank: int,
    size: int,
    *,
    init: str,
    team: int = 1,
    timeout_s: float = 60.0,
    generation: int = 0,
    secret: bytes = b"",
    device: torch.device | str = "cpu",
    patience_s: float = PATIENCE_S,
) -> Group:
    """The group of this rank, once all `size` ranks have come.

    init        "tcp://host:port", where rank 0 listens, or "env://" (MASTER_ADDR, MASTER_PORT)
    secret      shared by all ranks; a process that does not know it is refused
    device      where tensors lie: they travel over gloo on a CPU, over NCCL on CUDA; between
                ranks of CUDA over gloo and the host's memory, where two of them share a device or
                one has no NCCL
    patience_s  how long a peer may take nothing before it counts as lost; with tensors on a device
                also how long it may send no heartbeat
    """
    if not 0 <= rank < size <= RANKS_MAX or team < 1 or size % team:
        raise BadInput(f"rank {rank} of {size} in teams of {team}: no such rank")
    host, port, is_agents_store = _address(init)
    place = RankPlace(
        rank=rank,
        size=size,
        team=team,
        generation=generation,
        host=host,
        port=port,
        is_agents_store=is_agents_store,
        secret=secret,
        device=torch.device(device),
        timeout_s=timeout_s,
        patience_s=patience_s,
        until_s=time.monotonic() + timeout_s,
    )
    return Meeting(place).hold()


class Meeting:
    """One attempt of a rank to join. If it fails, everything that it opened is closed."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._wires: dict[tuple[int, int], Wire] = {}
        self._ending = Ending()
        self._store: Any = None
        self._device = place.device

    def hold(self) -> Group:
        try:
            host = self._meet()
            links = self._links(host)
            team = self._team(host)
            self._agree()
        except BaseException:
            for wire in self._wires.values():
                wire.close()
            raise
        names = {link.peer: self._place.name(link.peer) for link in links.values()}
        reports = {link.peer: link for name, link in links.items() if name.isdigit()}
        pulse = Pulse(reports, names, self._ending, silent_s=self._place.silent_s)
        place = self._place
        name = place.name(place.rank)
        group = JoinedGroup(place.rank, place.size, name, team, links, pulse, self._ending)
        self._store = None
        group.start()
        return group if self._device == place.device else StagedGroup(group, place.device)

    def _meet(self) -> str:
        """Finds all ranks and connects a wire to each neighbour; returns this rank's address."""
        place = self._place
        family, own = _own_address(place.host, place.port)
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((own, 0))
            listener.listen(place.size + 8)
            addresses = self._gather(f"{own} {listener.getsockname()[1]}")
            for ends in _wires_of(place):
                if ends.dialler == place.rank:
                    self._dial(ends, addresses[ends.answerer])
            self._answer(listener)
        return own

    def _gather(self, mine: str) -> dict[int, str]:
        """Writes this rank's address into the store and waits for all others'."""
        place = self._place
        missing, addresses, homes = set(range(place.size)), {}, {}
        while missing:
            try:
                if self._store is None:
                    self._store = self._enter(f"{place.size} {place.team} {place.home} {mine}")
                for rank in sorted(missing):
                    if self._store.check([str(rank)]):
                        homes[rank], addresses[rank] = self._read(rank)
                missing -= set(addresses)
            except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as wrong:
                self._store = None
                if place.left_s <= 0:
                    raise self._store_missing() from wrong
            if missing and place.left_s <= 0:
                raise self._missing(missing)
            if missing:
                time.sleep(LOOK_S)
        self._device = self._carried(homes, addresses)
        return addresses

    def _carried(self, homes: dict[int, str], addresses: dict[int, str]) -> torch.device:
        """Where tensors lie that go from rank to rank: on each rank's device, or on the host."""
        place = self._place
        kinds = {home.removeprefix(BY_HOST).partition(":")[0] for home in homes.values()}
        if len(kinds) > 1:
            raise BadInput(f"{place.where}: tensors are on {' and on '.join(sorted(kinds))}")
        shared = len({(homes[rank], addresses[rank].split(" ")[0]) for rank in homes}) < place.size
        by_host = any(home.startswith(BY_HOST) for home in homes.values())
        if place.device.type == "cpu" or place.team > 1 or not (shared or by_host):
            return place.device
        return torch.device("cpu")

    def _enter(self, mine: str) -> Any:
        place = self._place
        store = TCPStore(
            place.host,
            place.port,
            is_master=place.rank == 0 and not place.is_agents_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(LOOK_S, place.left_s)),
        )
        ours = PrefixStore(f"ess/{place.generation}", store)
        if ours.add(f"claim/{place.rank}", 1) > 1:
            raise BadState(f"{place.name(place.rank)} joined {place.where} twice")
        ours.set(str(place.rank), mine)
        return ours

    def _read(self, rank: int) -> tuple[str, str]:
        """Where its tensors are, and its address."""
        place = self._place
        size, team, home, address = self._store.get(str(rank)).decode().split(" ", 3)
        if (int(size), int(team)) != (place.size, place.team):
            raise BadInput(
                f"rank {rank} was started for {size} ranks in teams of {team}, "
                f"rank {place.rank} for {place.size} in teams of {place.team}"
            )
        return home, address

    def _missing(self, ranks: set[int]) -> Unavailable:
        names = ", ".join(self._place.name(rank) for rank in sorted(ranks))
        waited_s = self._place.timeout_s
        return Unavailable(f"missing in {self._place.where} after {waited_s:g} s: {names}")

    def _store_missing(self) -> Unavailable:
        if self._place.rank == 0:
            return Unavailable(f"{self._place.where}: the store cannot listen there")
        return self._missing({0})

    def _dial(self, ends: Ends, address: str) -> None:
        place = self._place
        host, port = address.rsplit(" ", 1)
        try:
            sock = socket.create_connection((host, int(port)), max(LOOK_S, place.left_s))
            self._wires[ends.purpose, ends.answerer] = greet(
                sock, ends, place.secret, patience_s=place.patience_s
            )
        except OSError as wrong:
            name = place.name(ends.answerer)
            raise Unavailable(f"{name} cannot be reached at {host}:{port}: {wrong}") from wrong

    def _answer(self, listener: socket.socket) -> None:
        """Waits for all ranks that dial this rank; refuses strangers."""
        place = self._place
        expected = {ends for ends in _wires_of(place) if ends.answerer == place.rank}
        while expected:
            listener.settimeout(max(LOOK_S, place.left_s))
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                raise self._missing({ends.dialler for ends in expected}) from None
            try:
                ends, wire = answer(sock, place.secret, expected, patience_s=place.patience_s)
            except (OSError, BadInput) as wrong:
                sock.close()
                if place.left_s <= 0:
                    raise self._missing({ends.dialler for ends in expected}) from wrong
                continue
            self._wires[ends.purpose, ends.dialler] = wire
            expected.remove(ends)

    def _links(self, host: str) -> dict[str, WiredLink]:
        """First the way from the stage before, then the way to the next: waits form no ring."""
        place, links = self._place, {}
        if place.rank >= place.team:
            peer = place.rank - place.team
            links["previous"] = self._link(STAGE, peer, inward=self._way(peer, 1, host))
        if place.rank + place.team < place.size:
            peer = place.rank + place.team
            links["next"] = self._link(STAGE, peer, outward=self._way(place.rank, 0, host))
        for purpose, peer in self._wires:
            if purpose == REPORT:
                links[str(peer)] = self._link(REPORT, peer)
        return links

    def _link(self, purpose: int, peer: int, **ways: TensorWay) -> WiredLink:
        place, is_report = self._place, purpose == REPORT
        terms = Terms(
            peer=peer,
            name=place.name(peer),
            device=self._device,
            ahead=REPORTS_MAX if is_report else AHEAD_MAX,
            held=REPORTS_MAX if is_report else HELD_MAX,
            patience_s=place.patience_s,
        )
        return WiredLink(self._wires[purpose, peer], terms, self._ending, **ways)

    def _way(self, sender: int, part: int, host: str) -> TensorWay:
        """The process group of `sender`, its rank 0, and the same member of the next stage."""
        device = self._device
        made = self._process_group(f"way/{sender}", part, 2, host, device)
        return (
            GlooWay(made, patience_s=self._place.patience_s)
            if device.type == "cpu"
            else NcclWay(made, device)
        )

    def _team(self, host: str) -> Team:
        place = self._place
        if place.team == 1:
            return OneTeam()
        stage, member = divmod(place.rank, place.team)
        over_gloo = self._process_group(
            f"team/{stage}", member, place.team, host, torch.device("cpu")
        )
        tensors = over_gloo
        if place.device.type != "cpu":
            name = f"team/{stage}/device"
            tensors = self._process_group(name, member, place.team, host, place.device)
        collectives = Collectives(host=over_gloo, tensors=tensors, patience_s=place.patience_s)
        return WiredTeam(stage, collectives, self._ending)

    def _process_group(
        self, name: str, rank: int, size: int, host: str, device: torch.device
    ) -> Any:
        store = PrefixStore(name, self._store)
        timeout_s = max(1.0, self._place.left_s)
        try:
            if device.type == "cpu":
                limits = {"timeout_s": timeout_s, "patience_s": self._place.patience_s}
                return gloo_group(store, rank, size, host=host, **limits)
            return nccl_group(store, rank, size, device=device)
        except (dist.DistError, RuntimeError) as wrong:
            raise Unavailable(f"{self._place.where}: {name} was not connected: {wrong}") from wrong

    def _agree(self) -> None:
        """No rank begins, or leaves the store, before all are ready."""
        place = self._place
        reports = {peer: wire for (purpose, peer), wire in self._wires.items() if purpose == REPORT}
        if place.rank:
            reports[0].write(Kind.READY)
        for peer, wire in reports.items():
            self._expect(peer, wire, Kind.GO if place.rank else Kind.READY)
        for wire in reports.values() if not place.rank else ():
            wire.write(Kind.GO)

    def _expect(self, peer: int, wire: Wire, kind: Kind) -> None:
        wire.limit_reading(max(LOOK_S, self._place.left_s))
        try:
            message = wire.read()
        except (OSError, BadInput) as wrong:
            raise self._missing({peer}) from wrong
        if message is None or message.kind is not kind:
            raise self._missing({peer})
        wire.limit_reading(None)


def _wires_of(place: RankPlace) -> list[Ends]:
    """The connections of this rank: every rank connects to rank 0, each stage to the stage
    before."""
    pairs = [(REPORT, rank, 0) for rank in range(1, place.size)]
    pairs += [(STAGE, rank, rank - place.team) for rank in range(place.team, place.size)]
    return [
        Ends(purpose, place.generation, dialler, answerer)
        for purpose, dialler, answerer in pairs
        if place.rank in (dialler, answerer)
    ]


def _address(init: str) -> tuple[str, int, bool]:
    """Host, port, and whether torchrun's agent runs the store there."""
    if init == "env://":
        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError) as wrong:
            raise BadInput(f"env:// needs MASTER_ADDR and MASTER_PORT: {wrong!r}") from wrong
        return host, port, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    scheme, _, rest = init.partition("://")
    host, _, digits = rest.rpartition(":")
    if scheme != "tcp" or not host or not digits.isdigit() or int(digits) > 65535:
        raise BadInput(f"init is {init!r}, 'tcp://host:port' or 'env://' expected")
    return host.strip("[]"), int(digits), False


def _own_address(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """The address from which this machine reaches the store."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return family, str(probe.getsockname()[0])
    except OSError as wrong:
        raise Unavailable(f"{host} cannot be reached: {wrong}") from wrong
