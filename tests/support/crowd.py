"""Answers that are received beside a test, each in its own thread, until the server or the test
ends them.

They are streams of /v1/completions, unless what is asked has another `path`, or `stream` false.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit


class Crowd:
    """`texts[i]` is what answer i has had so far, as raw lines."""

    def __init__(self, url: str, asked: Sequence[dict], *, key: str = "") -> None:
        self._address = urlsplit(url)
        self._key = key
        self._asked = asked
        self.texts: list[bytes] = []
        self._made: list[http.client.HTTPConnection] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Crowd:
        for asked in self._asked:
            self.add(asked)
        return self

    def add(self, asked: dict) -> None:
        """Start one more stream. Streams started at once reach the server in any order."""
        number = len(self._threads)
        self.texts.append(b"")
        self._threads.append(
            threading.Thread(target=self._stream, args=(number, asked), daemon=True)
        )
        self._threads[-1].start()

    def __exit__(self, *error: object) -> None:
        for made in self._made:
            with contextlib.suppress(OSError):
                made.sock and made.sock.shutdown(2)
        for thread in self._threads:
            thread.join(20)
        for made in self._made:
            made.close()

    def is_over(self, number: int) -> bool:
        return not self._threads[number].is_alive()

    def _stream(self, number: int, asked: dict) -> None:
        made = http.client.HTTPConnection(self._address.netloc, timeout=120)
        self._made.append(made)
        headers = {"content-type": "application/json", "x-request-id": f"crowd-{number:02d}"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            path, body = asked.get("path", "/v1/completions"), {"stream": True, **asked}
            body.pop("path", None)
            made.request("POST", path, json.dumps(body), headers)
            answer = made.getresponse()
            while line := answer.readline():
                self.texts[number] += line
