"""`ess serve --pd 1p3d`: prefill and decode workers here, a stock router before them, as one.

    prefill workers --listen--> decode workers (told where) --all ready--> router --> table, example

Every process is an ordinary one, `ess prefill`, `ess decode` or the router's own script, and could
be started by hand. What ends is started again at the same port. At the end decode workers finish
their streams first, which need the others; then prefill workers end, then the router. None of them
outlives us, however we end.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from ess import console
from ess.clock import Clock, RealClock
from ess.errors import Unavailable
from ess.ports import kept_port
from ess.server.commands.pd import routers, table
from ess.server.commands.pd.keeper import Keeper, Order
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
ASK_S: Final = 2.0
ROUTER_END_S: Final = 1.0  # nothing is open then; smg takes five seconds of rest
TELL_EVERY_S: Final = 10.0


def serve_pd(
    text: str,
    router: RouterName | None,
    flags: Mapping[str, Any],
    *,
    config: Path | None,
    json: bool,
) -> int:
    """Serve until told to end; the exit code."""
    shape = shape_of(text)
    flags, stages = stages_of(flags)
    resolved = resolve(flags, config=config, environment=os.environ)
    share = share_of(resolved, shape, stages)
    chosen = routers.choose(router, has_keys=bool(resolved.settings.keys))
    for sentence in resolved.notes:
        console.note(f"ess: {sentence}")
    settings = resolved.settings
    with kept_place(settings) as place, own_folder() as folder, unblocked_stderr():
        crew = Crew(shape, share, chosen, place, settings, Path(folder), RealClock())
        return asyncio.run(crew.run(json=json))


@contextlib.contextmanager
def kept_place(settings: Settings) -> Iterator[Place]:
    """The router starts last: nobody else is to have its ports by then."""
    host = settings.host
    with kept_port(host, settings.port) as port, kept_port(HOST) as metrics_port:
        yield Place(host=host, port=port, metrics_port=metrics_port)


class Crew:
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
        self._clock = clock
        self._environment = clean(os.environ)
        self._kept: dict[str, list[Keeper]] = {"prefill": [], "decode": [], "router": []}
        self._tasks: dict[asyncio.Task[None], Keeper] = {}
        self._stop = asyncio.Event()

    async def run(self, *, json: bool) -> int:
        """0 if it was asked to end; 1 if too few workers or no router is left."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            if not await self._unless_stopped(self._begin()):
                return 0
            table.show(self._about(), self._share, json=json)
            return 1 if await self._unless_stopped(self._watch()) else 0
        finally:
            await self._end()

    def _on_signal(self) -> None:
        """The first signal ends all processes in order, the second kills them at once."""
        if self._stop.is_set():
            for kept in self._kept.values():
                for keeper in kept:
                    keeper.kill()
        self._stop.set()

    # ---- the start

    async def _begin(self) -> None:
        secret = self._folder / "peer.secret"
        write_private(secret, secrets.token_urlsafe(SECRET_BYTES))
        prefills = [self._worker("prefill", name, secret) for name in self._shape.names("prefill")]
        for keeper in prefills:
            await self._wait_until(keeper, keeper.listens, "listening")
        peers = ",".join(address_of(keeper.url) for keeper in prefills)
        decodes = [
            self._worker("decode", name, secret, peers=peers)
            for name in self._shape.names("decode")
        ]
        for keeper in (*prefills, *decodes):
            await self._wait_until(keeper, keeper.ready, "ready")
        router = self._start_router(prefills, decodes)
        await self._wait_until(router, router.ready, "ready")

    def _worker(self, role: Role, name: str, secret: Path, **told: str) -> Keeper:
        """Its settings are a file in our folder: the table of processes shows none of them."""
        path = self._folder / f"{name}.json"
        given = {**self._share.settings, "host": HOST, "peer_secret_file": str(secret), **told}
        if role == "prefill":
            given |= self._share.stages
        write_private(path, msgspec.json.encode(given).decode())
        words = (role, "--json", "--config", str(path))
        return self._keep(role, Order(name=name, home=ESS, words=words), self._is_worker_ready)

    def _start_router(self, prefills: Sequence[Keeper], decodes: Sequence[Keeper]) -> Keeper:
        words = routers.words_for(
            self._router,
            self._place,
            prefills=[keeper.url for keeper in prefills],
            decodes=[keeper.url for keeper in decodes],
            key=self._key,
        )
        order = Order(name="router", home=self._router.home, words=words, url=self._place.url)
        return self._keep("router", order, self._is_router_ready)

    def _keep(self, role: str, order: Order, is_ready: Callable[[str], Awaitable[bool]]) -> Keeper:
        keeper = Keeper(order, environment=self._environment, is_ready=is_ready, clock=self._clock)
        self._kept[role].append(keeper)
        self._tasks[keeper.start()] = keeper
        return keeper

    @property
    def _key(self) -> str:
        return (self._settings.keys or ("",))[0]

    async def _is_worker_ready(self, url: str) -> bool:
        status, _ = await asyncio.to_thread(ask, url, "/ready")
        return status == 200

    async def _is_router_ready(self, url: str) -> bool:
        """Whether the router calls every worker healthy."""
        status, content = await asyncio.to_thread(ask, url, "/workers", self._key)
        if status != 200:
            return False
        listed = msgspec.json.decode(content).get("workers", [])
        return sum(bool(worker.get("is_healthy")) for worker in listed) == self._shape.count

    async def _wait_until(self, keeper: Keeper, event: asyncio.Event, what: str) -> None:
        """Unavailable if anything is given up meanwhile."""
        waiting = asyncio.ensure_future(event.wait())
        began_s = self._clock.now_s()
        try:
            while not event.is_set():
                everything = {waiting, *self._tasks}
                done, _ = await asyncio.wait(
                    everything, timeout=TELL_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task, given_up in self._tasks.items():
                    if task in done:
                        raise Unavailable(given_up.why_lost)
                if not done:
                    passed_s = self._clock.now_s() - began_s
                    console.note(f"ess: {keeper.name} is not {what} after {passed_s:.0f} s")
        finally:
            waiting.cancel()

    # ---- the life and the end

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work came to its end before somebody said to stop."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if working.done():
            await working
            return True
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return False

    async def _watch(self) -> None:
        """Returns when all processes of some kind have been given up."""
        while all(any(not k.why_lost for k in kept) for kept in self._kept.values()):
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                keeper = self._tasks.pop(task)
                console.note(f"ess: {keeper.why_lost}\ness: {keeper.name} is given up")

    async def _end(self) -> None:
        """Decode workers first: their streams need the others. Nothing is left afterwards."""
        within_s = self._settings.drain_s + HANG_S
        for kind in ("decode", "prefill"):
            await asyncio.gather(*(k.end(within_s=within_s) for k in self._kept[kind]))
        await asyncio.gather(*(k.end(within_s=ROUTER_END_S) for k in self._kept["router"]))

    def _about(self) -> list[table.Line]:
        return [
            table.Line(role=role, name=keeper.name, url=keeper.url, pid=keeper.pid)
            for role, kept in self._kept.items()
            for keeper in kept
        ]


def address_of(url: str) -> str:
    return urlsplit(url).netloc


def write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def ask(url: str, path: str, key: str = "") -> tuple[int, bytes]:
    """Status and content of a GET; 0 if there is no answer."""
    connection = http.client.HTTPConnection(address_of(url), timeout=ASK_S)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
