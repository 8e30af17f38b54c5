"""Processes that run together: started in order, watched, and ended by one signal."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ess import console
from ess.clock import Clock
from ess.errors import Unavailable
from ess.server.commands.pd.keeper import Keeper, Order
from ess.server.commands.pd.orphans import Orphans

ASK_S: Final = 2.0
TELL_EVERY_S: Final = 10.0
LOOK_S: Final = 0.25


class Kept:
    """Owns the keepers, by role; their processes get `environment`."""

    def __init__(
        self, roles: Sequence[str], *, environment: Mapping[str, str], clock: Clock
    ) -> None:
        self._environment = environment
        self._clock = clock
        self._keepers: dict[str, list[Keeper]] = {role: [] for role in roles}
        self._retired: dict[str, list[Keeper]] = {role: [] for role in roles}
        self._tasks: dict[asyncio.Task[None], Keeper] = {}
        self._stop = asyncio.Event()
        self._by = signal.SIGTERM
        self._hung_up = asyncio.Event()
        self._orphans = Orphans(clock)

    def heed_signals(self) -> None:
        """The first signal ends all processes in order; SIGINT behind it kills them at once, and
        SIGTERM behind it says nothing new. On a terminal, which could be closed, SIGHUP does what
        SIGINT does. Elsewhere it is passed on to servers that are ready, which read files again;
        routers read none."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            if os.isatty(0):
                loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGINT)
            else:
                loop.add_signal_handler(signal.SIGHUP, self._refresh)

    def _refresh(self) -> None:
        self._hung_up.set()
        for role, keeper in self.all():
            if role != "router" and keeper.ready.is_set():
                keeper.refresh()

    def _on_signal(self, number: signal.Signals) -> None:
        kept = itertools.chain(*self._keepers.values(), *self._retired.values())
        if not self._stop.is_set():
            self._by = number
            self._stop.set()
            for keeper in kept:
                keeper.start_no_more()
        elif number != signal.SIGTERM:
            for keeper in kept:
                keeper.kill()

    def keep(self, role: str, order: Order, is_ready: Callable[[str], Awaitable[bool]]) -> Keeper:
        keeper = Keeper(
            order,
            environment=self._environment,
            is_ready=is_ready,
            clock=self._clock,
            orphans=self._orphans,
        )
        self._keepers[role].append(keeper)
        self._tasks[keeper.start()] = keeper
        return keeper

    async def until_hangup(self, *, within_s: float) -> None:
        """Until SIGHUP comes, or for so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hung_up.wait(), within_s)
        self._hung_up.clear()

    async def replace(
        self, role: str, order: Order, is_ready: Callable[[str], Awaitable[bool]]
    ) -> None:
        """Starts another program in place of the only one of this role, as soon as that one accepts
        no connections; it finishes what it has begun, and is not started again."""
        [last] = self._keepers[role]
        last.retire()
        while await asyncio.to_thread(accepts, order.url):
            await asyncio.sleep(LOOK_S)
        self.keep(role, order, is_ready)
        self._keepers[role].remove(last)
        self._retired[role].append(last)

    def of(self, role: str) -> list[Keeper]:
        return self._keepers[role]

    def all(self) -> list[tuple[str, Keeper]]:
        return [(role, keeper) for role, keepers in self._keepers.items() for keeper in keepers]

    async def wait_until(self, keeper: Keeper, event: asyncio.Event, what: str) -> None:
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

    async def unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether the work came to its end before `stop` was called."""
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

    async def watch(self) -> None:
        """Returns when all processes of some role have been given up."""
        while all(any(not k.why_lost for k in keepers) for keepers in self._keepers.values()):
            done, _ = await asyncio.wait(
                self._tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                keeper = self._tasks.pop(task)
                if keeper.why_lost:
                    console.note(f"ess: {keeper.why_lost}\ness: {keeper.name} is given up")

    async def end(self, role: str, *, within_s: float) -> None:
        """Passes a SIGINT on to servers, which then wait for no probes; routers know SIGTERM."""
        kept = (*self._keepers[role], *self._retired[role])
        by = signal.SIGTERM if role == "router" else self._by
        await asyncio.gather(*(keeper.end(within_s=within_s, by=by) for keeper in kept))


def address_of(url: str) -> str:
    return urlsplit(url).netloc


def accepts(url: str) -> bool:
    """Whether anything accepts connections there."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=ASK_S).close()
    except OSError:
        return False
    return True


def write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


async def is_worker_ready(url: str) -> bool:
    status, _ = await asyncio.to_thread(ask, url, "/ready")
    return status == 200


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
