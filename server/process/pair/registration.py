"""Registers a worker with a router, sglang-router or smg, and removes it when it leaves.

    GET /workers                every `SEE_EVERY_S`: a restarted router knows no worker
    POST /workers               if we are not listed: {url, worker_type, bootstrap_port}
    DELETE /workers/{id}        when we drain

Whatever the router does, we serve: a thread asks it, with a time limit. Whatever goes wrong, it is
asked again: there is no other way to register this worker.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from ess import console
from ess.decoding import UNDECODABLE
from ess.errors import Unavailable, reason_of
from ess.server.commands.start.settings import Settings

SEE_EVERY_S: Final = 5.0
ASK_S: Final = 2.0
ANSWER_BYTES_MAX: Final = 4 << 20
ANY: Final = frozenset({"0.0.0.0", "::"})
HTTP_PORT: Final = 80


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A router's entry for a worker."""

    url: str
    worker_type: str
    bootstrap_port: int | None = None


class Router:
    """A router's control plane; `key` is its API key, if it has one."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.host, self.port = parts.hostname or "", parts.port or HTTP_PORT
        self._path = parts.path.rstrip("/")
        self._headers = {"content-type": "application/json", "connection": "close"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The document that the router answers; Unavailable for anything but a good answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=ASK_S)
        sent = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, self._path + path, sent, self._headers)
            answer = connection.getresponse()
            content = answer.read(ANSWER_BYTES_MAX)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(reason_of(error)) from None
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            reason = content[:200].decode(errors="replace")
            raise Unavailable(f"it answers {answer.status}: {reason}")
        try:
            return msgspec.json.decode(content or b"{}")
        except UNDECODABLE:
            raise Unavailable("its answer is not JSON") from None


class Registration:
    """Threads ask the router, one at a time, so that nothing begun before `leave` lists us again
    afterwards."""

    def __init__(self, router: Router, entry: Entry) -> None:
        self._router = router
        self._entry = entry
        self._asks = threading.Lock()
        self._began = False
        self._leaves = False
        self._said = ""

    async def run(self) -> None:
        """Registers, and checks the entry, as long as the server runs."""
        self._began = True
        while not self._leaves:
            try:
                known = await asyncio.to_thread(self._see)
                self._say(f"knows this worker as {known}")
            except Exception as error:  # also of the system, which may have no thread left
                self._say(f"is not told of this worker: {reason_of(error)}")
            await asyncio.sleep(SEE_EVERY_S)

    async def leave(self) -> None:
        """Has the router send no new requests here, if it can be reached."""
        self._leaves = True
        if not self._began:
            return
        try:
            await asyncio.to_thread(self._withdraw)
        except Exception as error:
            self._say(f"cannot be told that this worker leaves: {reason_of(error)}")

    def _see(self) -> str:
        with self._asks:
            entry = self._reachable()
            if not self._leaves and not self._ids(entry.url):
                self._router.ask("POST", "/workers", entry)
            return entry.url

    def _withdraw(self) -> None:
        with self._asks:
            for name in self._ids(self._reachable().url):
                self._router.ask("DELETE", f"/workers/{quote(name, safe='')}")

    def _reachable(self) -> Entry:
        return msgspec.structs.replace(self._entry, url=seen_from(self._router, self._entry.url))

    def _ids(self, url: str) -> list[str]:
        """The ids under which the router lists this worker."""
        listed = self._router.ask("GET", "/workers")
        workers = listed.get("workers") if isinstance(listed, Mapping) else None
        if not isinstance(workers, list):
            raise Unavailable("it does not list its workers")
        described = [worker for worker in workers if isinstance(worker, Mapping)]
        return [str(w.get("id")) for w in described if w.get("url") == url]

    def _say(self, what: str) -> None:
        """Logs the state of the registration when it changes."""
        if what != self._said:
            console.note(f"ess: the router {self._router.url} {what}")
        self._said = what


def seen_from(router: Router, url: str) -> str:
    """Our URL with a host that the router can reach: a worker that listens on all addresses is
    registered with the one from which it reaches the router."""
    parts = urlsplit(url)
    if parts.hostname not in ANY:
        return url
    family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((router.host, router.port))
            own = probe.getsockname()[0]
    except OSError as error:
        raise Unavailable(f"the router {router.url} cannot be reached: {error.strerror}") from None
    shown = f"[{own}]" if ":" in own else own
    return f"{parts.scheme}://{shown}:{parts.port}{parts.path}"


def registration_of(settings: Settings, url: str, port: int) -> Registration | None:
    """`port` is where decode workers connect to a prefill worker."""
    if not settings.register:
        return None
    entry = Entry(
        url=url,
        worker_type=settings.role,
        bootstrap_port=port if settings.role == "prefill" else None,
    )
    return Registration(Router(settings.register, settings.register_key), entry)
