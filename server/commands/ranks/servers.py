"""`ess serve --dp-size 4`: the servers of all ranks that run here.

Each is an ordinary `ess serve` with its own rank and port, and could be started by hand; a stock
router in front sends it requests as to any worker. A server that ends is started again at the same
port; the engines of the others, which have ended with it, then meet the new one. At the end all
drain side by side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ess import console
from ess.clock import RealClock
from ess.engine.devices import is_device
from ess.errors import BadInput
from ess.ports import kept_port
from ess.server.commands.pd.keeper import Keeper, Order
from ess.server.commands.pd.kept import Kept, is_worker_ready, write_private
from ess.server.commands.pd.orphans import adopt_orphans
from ess.server.commands.pd.shares import clean, told_settings
from ess.server.commands.start.files.words import read_words
from ess.server.commands.start.resolving import checked, derived, layout_of, planned, sized
from ess.server.commands.start.settings import Resolved, Settings
from ess.server.process.logs.log_pipe import unblocked_stderr
from ess.server.process.logs.log_times import passed_on
from ess.server.process.own_folder import own_folder
from ess.server.process.signals import HANG_S

ESS: Final = "ess.server.commands.cli:main"
SECRET_BYTES: Final = 32
LOCAL: Final = "127.0.0.1"

# Settings of a single server, each with the reason.
WHY_NOT: Final[Mapping[str, str]] = {
    "keep_responses": "each rank would find its own responses alone",
    "uds": "each rank listens on a port of its own",
    "tls_cert": "ranks are asked by HTTP whether they live: let a proxy speak HTTPS",
    "bootstrap_port": "each rank is met at its own port",
    "transfer_port": "each rank takes a free one",
    "prefix_cache_dir": "each rank has a prefix cache of its own: start the ranks by hand",
    "kv_events": "each rank publishes at an address of its own: start the ranks by hand",
    "kv_events_replay": "each rank publishes at an address of its own: start the ranks by hand",
}
OF_RANK: Final = frozenset(
    (
        *("nnodes", "node_rank", "dist_init_addr", "dp_rank", "host", "port"),
        *("peer_secret", "peer_secret_file", "executor"),
    )
)

ON_DEVICE: Final = ("slot_bytes", "index_bytes", "graph_bytes")


def check_alike(resolved: Resolved) -> None:
    """Refuses settings that several ranks cannot share."""
    for name, why in WHY_NOT.items():
        if resolved.origins[name] != "default":
            raise BadInput(f"{name} cannot be used where one command starts several ranks: {why}")


def serve_ranks(resolved: Resolved, *, json: bool) -> int:
    """Serves until told to end; returns the exit code."""
    division = divided(resolved)
    with (
        own_folder() as folder,
        kept_places(division.settings) as (ports, address),
        unblocked_stderr(resolved.settings.log_format),
    ):
        for sentence in division.notes:
            console.note(f"ess: {sentence}")
        processes = RankProcesses(division, ports, address, Path(folder))
        return asyncio.run(processes.run(json=json))


def ranks_of(settings: Settings) -> range:
    """The ranks of this machine."""
    count = settings.dp_size // settings.nnodes
    return range(settings.node_rank * count, (settings.node_rank + 1) * count)


def device_of(settings: Settings, rank: int) -> dict[str, str]:
    """The device of a rank: the ranks of this machine take its devices in order."""
    if not is_device(settings.device):
        return {}
    return {"device": f"{settings.device}:{rank - ranks_of(settings).start}"}


def divided(resolved: Resolved) -> Resolved:
    """The settings of each rank: automatic sizes and threads become its share of the machine; given
    ones hold for each rank. Automatic sizes on a device stay so: each rank has a device of its own,
    and of one of them other processes may have a part. Checks everything that a rank would check.
    """
    checkpoint = checked(resolved.settings)
    resolved = derived(resolved, checkpoint)
    layout = layout_of(resolved.settings, checkpoint)
    read_words(resolved.settings, checkpoint)
    count = len(ranks_of(resolved.settings))
    plan = planned(resolved.settings, checkpoint, layout, shared_by=count)
    but = () if plan.device is None else ON_DEVICE
    return sized(resolved, plan, but=but, written=str)


@contextlib.contextmanager
def kept_places(settings: Settings) -> Iterator[tuple[list[int], str]]:
    """Reserves the ports of the ranks, in a row or free ones, and the address where they meet."""
    with contextlib.ExitStack() as kept:
        first, count = settings.port, len(ranks_of(settings))
        wanted = [first + at if first else 0 for at in range(count)]
        ports = [kept.enter_context(kept_port(settings.host, port)) for port in wanted]
        address = settings.dist_init_addr
        if not address:
            address = f"{LOCAL}:{kept.enter_context(kept_port(LOCAL))}"
        yield ports, address


class RankProcesses:
    """Owns the servers of the ranks, and the order in which they start and end."""

    def __init__(
        self, resolved: Resolved, ports: Sequence[int], address: str, folder: Path
    ) -> None:
        self._resolved = resolved
        self._ports = ports
        self._address = address
        self._folder = folder
        self._kept = Kept(["rank"], environment=clean(os.environ), clock=RealClock())

    async def run(self, *, json: bool) -> int:
        """Returns 0 if it was asked to end, 1 if no rank is left."""
        self._kept.heed_signals()
        adopt_orphans()
        try:
            if not await self._kept.unless_stopped(self._begin()):
                return 0
            kept = [(keeper.name, keeper.url, keeper.pid) for _, keeper in self._kept.all()]
            show(kept, json=json)
            return 1 if await self._kept.unless_stopped(self._kept.watch()) else 0
        finally:
            await self._kept.end("rank", within_s=self._resolved.settings.drain_s + HANG_S)

    async def _begin(self) -> None:
        secret = self._folder / "peer.secret"
        write_private(secret, self._secret)
        numbers = ranks_of(self._resolved.settings)
        started = [
            self._start(rank, port, secret) for rank, port in zip(numbers, self._ports, strict=True)
        ]
        for keeper in started:
            await self._kept.wait_until(keeper, keeper.ready, "ready")

    @property
    def _secret(self) -> str:
        """The secret of all machines, or a new one for this machine alone."""
        return self._resolved.settings.peer_secret or new_secret()

    def _start(self, rank: int, port: int, secret: Path) -> Keeper:
        """Starts a rank with its settings in a file: the process table must not show them."""
        settings, path = self._resolved.settings, self._folder / f"rank-{rank}.json"
        given: dict[str, Any] = {
            **told_settings(self._resolved, but=OF_RANK),
            "dp_rank": rank,
            **device_of(settings, rank),
            "dist_init_addr": self._address,
            "host": settings.host,
            "port": port,
            "peer_secret_file": str(secret),
            "log_format": passed_on(settings.log_format),
        }
        write_private(path, msgspec.json.encode(given).decode())
        order = Order(
            name=f"rank-{rank}",
            home=ESS,
            words=("serve", "--json", "--config", str(path)),
            url=f"http://{settings.host}:{port}",
        )
        return self._kept.keep("rank", order, is_worker_ready)


def new_secret() -> str:
    return secrets.token_urlsafe(SECRET_BYTES)


def show(ranks: Sequence[tuple[str, str, int]], *, json: bool) -> None:
    """Prints the name, URL and process of each; a closed stdout is ignored."""
    try:
        if json:
            lines = [{"name": name, "url": url, "pid": pid} for name, url, pid in ranks]
            console.print_json({"url": lines[0]["url"], "processes": lines})
        else:
            for name, url, pid in ranks:
                print(f"{name}   {url}   process {pid}")
        sys.stdout.flush()
    except OSError as error:
        console.drop_stdout()
        console.note(f"ess: what is served cannot be printed: {error.strerror}")
