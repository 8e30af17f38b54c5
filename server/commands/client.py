"""A running server as its client sees it. Standard library and our console only."""

from __future__ import annotations

import http
import http.client
import json as jsons
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from ess import console
from ess.errors import BadInput, Unavailable, reason_of

URL: Final = "http://127.0.0.1:8000"
HERE: Final = ("127.0.0.1", "localhost", "::1")
TIMEOUT_S: Final = 600.0
LOOK_S: Final = 0.25
LISTEN_S: Final = 10.0
"""A server that was started just now listens by then."""
LOADS: Final = "/v1/loads"
UNSERVED: Final = (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED)


class Entry(dict[str, Any]):
    """An entry of a list in a server's answer; reading a name that it lacks is refused."""

    def __init__(self, told: Mapping[str, Any], place: str) -> None:
        super().__init__(told)
        self._place = place

    def __missing__(self, name: str) -> Any:
        raise Unavailable(f"{self._place} has no {name!r}; is it a server of ESS?")


class Client:
    """One server, also by its base address for OpenAI's client, which ends with /v1; every call is
    a connection of its own."""

    def __init__(self, url: str, api_key: str | None, *, timeout_s: float = TIMEOUT_S) -> None:
        url = url if "://" in url else f"http://{url}"
        self._parts = urlsplit(url)
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise BadInput(f"--url {url}: write http://HOST:PORT")
        self._path = self._parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        self.url = url
        self._timeout_s = timeout_s
        self._key = (api_key or os.environ.get("ESS_API_KEY", "").partition(",")[0]).strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise BadInput("the API key has a character that is not visible ASCII")

    def wait_ready(self) -> None:
        """Waits until the server takes requests, and shows why it does not."""
        self._wait_listening()
        shown = ""
        while why := self._why_not_ready():
            if why != shown:
                console.note(f"waiting for {self.url}, which says: {why}")
            shown = why
            time.sleep(LOOK_S)

    def _wait_listening(self) -> None:
        """A server of this machine may be about to start. If it does not, the first request says
        so."""
        deadline_s = time.monotonic() + LISTEN_S
        is_told = False
        while self._is_here and not self._listens and time.monotonic() < deadline_s:
            if not is_told:
                console.note(f"no server at {self.url} yet: waiting {LISTEN_S:g} s{self._advice}")
            is_told = True
            time.sleep(LOOK_S)

    @property
    def _listens(self) -> bool:
        try:
            socket.create_connection((self._parts.hostname, self._port)).close()
        except OSError:
            return False
        return True

    @property
    def _port(self) -> int:
        is_safe = self._parts.scheme == "https"
        return self._parts.port or (http.client.HTTPS_PORT if is_safe else http.client.HTTP_PORT)

    @property
    def _is_here(self) -> bool:
        return self._parts.hostname in HERE

    @property
    def _advice(self) -> str:
        """How to start a server, as the end of a sentence."""
        if not self._is_here:
            return ""
        flag = "" if self.url == URL else f" --port {self._port}"
        return f"; `ess serve{flag}` starts one"

    def _why_not_ready(self) -> str:
        with self._asked("GET", "/ready", None) as answer:
            raw = answer.read()
        return _message(raw) if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE else ""

    def ask(self, path: str) -> dict[str, Any]:
        with self._send("GET", path, None) as answer:
            raw = b"".join(self._lines(answer))
        try:
            document: dict[str, Any] = jsons.loads(raw)
        except ValueError:
            raise Unavailable(f"{self.url} has no JSON at {path}; is it a server of ESS?") from None
        return document

    def first(self, path: str, name: str) -> Entry:
        """The first entry of the list `name` in the document there."""
        try:
            return Entry(self.ask(path)[name][0], f"{path} of {self.url}")
        except (ValueError, LookupError, TypeError):
            raise Unavailable(
                f"{self.url} has an empty list {name!r} at {path}, or none; is it a server of ESS?"
            ) from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream, to the last; an error event is raised."""
        with self._send("POST", path, body) as answer:
            for line in self._lines(answer):
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event: dict[str, Any] = jsons.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise Unavailable(f"the server says: {event['error']['message']}")
                yield event

    def _lines(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from answer
        except TimeoutError:
            raise self._silent() from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the connection to {self.url} broke: {error}") from None

    def _silent(self) -> Unavailable:
        return Unavailable(f"{self.url} has not answered for {self._timeout_s:g} s")

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        answer = self._asked(method, path, body)
        if answer.status != http.HTTPStatus.OK:
            with answer:
                reason = _message(answer.read())
            is_missing = answer.status in UNSERVED and path.startswith(LOADS)
            hint = "; is it a router? --url is the address of a worker" if is_missing else ""
            raise Unavailable(f"{self.url} answers {answer.status}: {reason}{hint}")
        return answer

    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        is_safe = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_safe else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._port, timeout=self._timeout_s)
        headers = {"connection": "close", "content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        sent = None if body is None else jsons.dumps(body).encode()
        try:
            connection.request(method, self._path + path, sent, headers)
            return connection.getresponse()
        except TimeoutError:
            connection.close()
            raise self._silent() from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unavailable(
                f"no server at {self.url}: {reason_of(error)}{self._advice}"
            ) from None


def _message(raw: bytes) -> str:
    try:
        return str(jsons.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        if raw.lstrip()[:1] == b"<":
            return "a page, not JSON; is it a server of ESS?"
        return raw[:200].decode("utf-8", "replace")
