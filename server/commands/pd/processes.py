"""`ess serve --pd 1p3d`: prefill and decode workers here, behind a stock router, run as one.

    prefill workers --listen--> decode workers (get addresses) --all ready--> router --> table

Every process is an ordinary one, `ess prefill`, `ess decode` or the router's own script, and could
be started by hand. A process that ends is started again at the same port. At the end decode workers
first finish their streams, which need the others; then prefill workers end, then the router. None
of them outlives this process, however it ends.

Workers read files of keys again when they change. A router has the keys of its start: when they
change, another takes its place, while the first finishes its streams. They are watched from before
the workers start, which may take minutes. The router itself asks with a key that is made here,
which the workers know too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ess import console
from ess.clock import Clock, RealClock
from ess.errors import BadInput
from ess.ports import kept_port
from ess.server.commands.pd import routers, table
from ess.server.commands.pd.keeper import Keeper, Order
from ess.server.commands.pd.kept import Kept, address_of, ask, is_worker_ready, write_private
from ess.server.commands.pd.orphans import adopt_orphans
from ess.server.commands.pd.routers import Place, Router, RouterName
from ess.server.commands.pd.shares import (
    Role,
    Shape,
    Share,
    clean,
    shape_of,
    share_of,
    stages_of,
)
from ess.server.commands.start.files.hidden_files import read_keys
from ess.server.commands.start.files.watched import FILES_S, Watched
from ess.server.commands.start.settings import Settings, resolve
from ess.server.commands.start.written_addresses import listed
from ess.server.process.logs.log_pipe import unblocked_stderr
from ess.server.process.logs.log_times import passed_on
from ess.server.process.own_folder import own_folder
from ess.server.process.signals import HANG_S

HOST: Final = "127.0.0.1"
ESS: Final = "ess.server.commands.cli:main"
SECRET_BYTES: Final = 32
ROUTER_END_S: Final = 1.0  # nothing is open then; smg sleeps five seconds


def serve_pd(
    text: str,
    router: RouterName | None,
    flags: Mapping[str, Any],
    *,
    config: Path | None,
    json: bool,
) -> int:
    """Serves until told to end; returns the exit code."""
    shape = shape_of(text)
    flags, stages = stages_of(flags)
    resolved = resolve(flags, config=config, environment=os.environ)
    share = share_of(resolved, shape, stages)
    chosen = routers.choose(router, has_keys=bool(resolved.settings.keys))
    settings = resolved.settings
    with (
        kept_place(settings) as place,
        own_folder() as folder,
        unblocked_stderr(settings.log_format),
    ):
        for sentence in resolved.notes:
            console.note(f"ess: {sentence}")
        processes = PdProcesses(shape, share, chosen, place, settings, Path(folder), RealClock())
        return asyncio.run(processes.run(json=json))


@contextlib.contextmanager
def kept_place(settings: Settings) -> Iterator[Place]:
    """Reserves the router's ports: it starts last, and no other program may take them by then."""
    host = settings.host
    with kept_port(host, settings.port) as port, kept_port(HOST) as metrics_port:
        yield Place(host=host, port=port, metrics_port=metrics_port)


class PdProcesses:
    """Owns the workers and the router, and the order in which they start and end."""

    def __init__(
        self,
        shape: Shape,
        share: Share,
        router: Router,
        place: Place,
        settings: Settings,
        folder: Path,
        clock: Clock,
    ) -> None:
        self._shape = shape
        self._share = share
        self._router = router
        self._place = place
        self._settings = settings
        self._folder = folder
        self._key = secrets.token_urlsafe(SECRET_BYTES) if settings.keys else ""
        self._keys = settings.keys
        paths = listed(settings.api_key_file)
        self._watched = Watched("api_key_file", paths, self._take_keys)
        if paths:
            with contextlib.suppress(BadInput):  # they were read before they were watched
                self._take_keys()
        roles = ("prefill", "decode", "router")
        self._kept = Kept(roles, environment=clean(os.environ), clock=clock)

    async def run(self, *, json: bool) -> int:
        """Returns 0 if it was asked to end, 1 if too few workers or no router is left."""
        self._kept.heed_signals()
        adopt_orphans()
        try:
            if not await self._kept.unless_stopped(self._begin()):
                return 0
            table.show(self._about(), self._share, json=json)
            following = asyncio.ensure_future(self._follow_keys())
            try:
                return 1 if await self._kept.unless_stopped(self._kept.watch()) else 0
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        finally:
            await self._end()

    # ---- the start

    async def _begin(self) -> None:
        secret = self._written("peer.secret", secrets.token_urlsafe(SECRET_BYTES))
        told = {"host": HOST, "peer_secret_file": secret, **self._key_files()}
        prefills = [self._worker("prefill", name, told) for name in self._shape.names("prefill")]
        for keeper in prefills:
            await self._kept.wait_until(keeper, keeper.listens, "listening")
        peers = ",".join(address_of(keeper.url) for keeper in prefills)
        decodes = [
            self._worker("decode", name, {**told, "peers": peers})
            for name in self._shape.names("decode")
        ]
        for keeper in (*prefills, *decodes):
            await self._kept.wait_until(keeper, keeper.ready, "ready")
        self._watched.refresh()
        router = self._kept.keep("router", self._router_order(), self._is_router_ready)
        await self._kept.wait_until(router, router.ready, "ready")

    def _written(self, name: str, text: str) -> str:
        """The path of a new file with this text, which this user alone can read."""
        path = self._folder / name
        write_private(path, text)
        return str(path)

    def _key_files(self) -> dict[str, str]:
        if not self._key:
            return {}
        settings = self._settings
        clients = settings.api_key_file or self._written("api.keys", settings.api_key)
        return {"api_key_file": f"{clients},{self._written('router.key', self._key)}"}

    def _worker(self, role: Role, name: str, told: Mapping[str, str]) -> Keeper:
        """Starts a worker with its settings in a file: the process table must not show them."""
        log_format = passed_on(self._settings.log_format)
        given = {**self._share.settings, **told, "log_format": log_format}
        if role == "prefill":
            given |= self._share.stages
        path = self._written(f"{name}.json", msgspec.json.encode(given).decode())
        words = (role, "--json", "--config", path)
        return self._kept.keep(role, Order(name=name, home=ESS, words=words), is_worker_ready)

    def _router_order(self) -> Order:
        words = routers.words_for(
            self._router,
            self._place,
            prefills=[keeper.url for keeper in self._kept.of("prefill")],
            decodes=[keeper.url for keeper in self._kept.of("decode")],
            key=self._key,
            keys=self._keys,
        )
        return Order(name="router", home=self._router.home, words=words, url=self._place.url)

    async def _is_router_ready(self, url: str) -> bool:
        """Whether the router calls every worker healthy."""
        status, content = await asyncio.to_thread(ask, url, "/workers", self._key)
        if status != 200:
            return False
        listed = msgspec.json.decode(content).get("workers", [])
        return sum(bool(worker.get("is_healthy")) for worker in listed) == self._shape.count

    # ---- keys that change

    async def _follow_keys(self) -> None:
        """Looks at the file of keys every few seconds, and at once after SIGHUP."""
        if not self._settings.api_key_file:
            return
        with contextlib.ExitStack() as ports:
            while True:
                await self._kept.until_hangup(within_s=FILES_S)
                if self._watched.refresh():
                    free = ports.enter_context(kept_port(HOST))  # the first router has its own yet
                    self._place = dataclasses.replace(self._place, metrics_port=free)
                    await self._kept.replace("router", self._router_order(), self._is_router_ready)

    def _take_keys(self) -> str:
        self._keys = listed(read_keys(self._settings.api_key_file))
        return "the next router starts with these keys"

    # ---- the end

    async def _end(self) -> None:
        """Ends decode workers first, as their streams need the others. No process is left."""
        within_s = self._settings.drain_s + HANG_S
        for kind in ("decode", "prefill"):
            await self._kept.end(kind, within_s=within_s)
        await self._kept.end("router", within_s=ROUTER_END_S)

    def _about(self) -> list[table.Line]:
        return [
            table.Line(role=role, name=keeper.name, url=keeper.url, pid=keeper.pid)
            for role, keeper in self._kept.all()
        ]
