"""`ess serve --pd 1p3d`: prefill and decode workers here, behind a stock router, run as one.

    prefill workers --listen--> decode workers (get addresses) --all ready--> router --> table

Every process is an ordinary one, `ess prefill`, `ess decode` or the router's own script, and could
be started by hand. A process that ends is started again at the same port. At the end decode workers
first finish their streams, which need the others; then prefill workers end, then the router. None
of them outlives this process, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ess import console
from ess.clock import Clock, RealClock
from ess.ports import kept_port
from ess.server.commands.pd import routers, table
from ess.server.commands.pd.keeper import Keeper, Order
from ess.server.commands.pd.kept import Kept, address_of, ask, is_worker_ready, write_private
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
from ess.server.commands.start.settings import Settings, resolve
from ess.server.process.lifecycle import HANG_S
from ess.server.process.log_pipe import unblocked_stderr
from ess.server.process.own_folder import own_folder

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
    is_json = settings.log_format == "json"
    with (
        kept_place(settings) as place,
        own_folder() as folder,
        unblocked_stderr(is_json=is_json),
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
        roles = ("prefill", "decode", "router")
        self._kept = Kept(roles, environment=clean(os.environ), clock=clock)

    async def run(self, *, json: bool) -> int:
        """Returns 0 if it was asked to end, 1 if too few workers or no router is left."""
        self._kept.heed_signals()
        try:
            if not await self._kept.unless_stopped(self._begin()):
                return 0
            table.show(self._about(), self._share, json=json)
            return 1 if await self._kept.unless_stopped(self._kept.watch()) else 0
        finally:
            await self._end()

    # ---- the start

    async def _begin(self) -> None:
        secret = self._folder / "peer.secret"
        write_private(secret, secrets.token_urlsafe(SECRET_BYTES))
        prefills = [self._worker("prefill", name, secret) for name in self._shape.names("prefill")]
        for keeper in prefills:
            await self._kept.wait_until(keeper, keeper.listens, "listening")
        peers = ",".join(address_of(keeper.url) for keeper in prefills)
        decodes = [
            self._worker("decode", name, secret, peers=peers)
            for name in self._shape.names("decode")
        ]
        for keeper in (*prefills, *decodes):
            await self._kept.wait_until(keeper, keeper.ready, "ready")
        router = self._start_router(prefills, decodes)
        await self._kept.wait_until(router, router.ready, "ready")

    def _worker(self, role: Role, name: str, secret: Path, **told: str) -> Keeper:
        """Starts a worker with its settings in a file: the process table must not show them."""
        path = self._folder / f"{name}.json"
        given = {**self._share.settings, "host": HOST, "peer_secret_file": str(secret), **told}
        if role == "prefill":
            given |= self._share.stages
        write_private(path, msgspec.json.encode(given).decode())
        words = (role, "--json", "--config", str(path))
        return self._kept.keep(role, Order(name=name, home=ESS, words=words), is_worker_ready)

    def _start_router(self, prefills: Sequence[Keeper], decodes: Sequence[Keeper]) -> Keeper:
        words = routers.words_for(
            self._router,
            self._place,
            prefills=[keeper.url for keeper in prefills],
            decodes=[keeper.url for keeper in decodes],
            key=self._key,
        )
        order = Order(name="router", home=self._router.home, words=words, url=self._place.url)
        return self._kept.keep("router", order, self._is_router_ready)

    @property
    def _key(self) -> str:
        return (self._settings.keys or ("",))[0]

    async def _is_router_ready(self, url: str) -> bool:
        """Whether the router calls every worker healthy."""
        status, content = await asyncio.to_thread(ask, url, "/workers", self._key)
        if status != 200:
            return False
        listed = msgspec.json.decode(content).get("workers", [])
        return sum(bool(worker.get("is_healthy")) for worker in listed) == self._shape.count

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
