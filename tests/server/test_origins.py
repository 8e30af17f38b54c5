"""Pages of other origins: those that `--allowed-origins` names may ask, and a browser lets them."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from email.message import Message
from typing import Any

import pytest

from ess.errors import BadInput
from ess.server.commands.start.written_addresses import read_origins
from tests.server.harness import PacedEngine, Served, saying
from tests.support import chromium
from tests.support.chromium import Browser

PAGE = "https://chat.example"
KEY = ("right",)
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def open_to_page() -> Iterator[Served]:
    with Served(PacedEngine(saying("one two")), origins=(PAGE,)) as made:
        yield made


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with Served(PacedEngine(saying("one two")), keys=KEY, origins=("*",)) as made:
        yield made


def exchange(
    served: Served, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Message, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, None if body is None else json.dumps(body), sent)
    answer = connection.getresponse()
    reply = answer.status, answer.headers, answer.read()
    connection.close()
    return reply


def preflight(served: Served, origin: str, **more: str) -> tuple[int, Message, bytes]:
    wish = {"access_control_request_method": "POST", "sec_fetch_site": "cross-site"}
    wish["access_control_request_headers"] = "authorization,content-type"
    return exchange(served, "OPTIONS", "/v1/chat/completions", origin=origin, **wish, **more)


def test_a_browser_is_told_what_an_allowed_page_may_do(open_to_page: Served, keyed: Served):
    for served, named in ((open_to_page, PAGE), (keyed, "*")):
        status, headers, _ = preflight(served, PAGE, access_control_request_private_network="true")
        assert status == 204
        assert headers["access-control-allow-origin"] == named
        assert "POST" in headers["access-control-allow-methods"]
        assert headers["access-control-allow-headers"] == "authorization,content-type"
        assert headers["access-control-allow-private-network"] == "true"
        assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_allowed_page_may_read_answers(open_to_page: Served, path: str, stream: bool):
    sent = {"origin": PAGE.upper(), "sec_fetch_site": "cross-site"}
    status, headers, body = exchange(open_to_page, "POST", path, ASKED | {"stream": stream}, **sent)
    assert status == 200, body
    assert headers["access-control-allow-origin"] == PAGE.upper()
    assert headers["access-control-expose-headers"] == "*"
    assert headers["vary"] == "origin"
    assert b"one" in body


def test_an_allowed_page_may_read_refusals_too(open_to_page: Served, keyed: Served):
    assert exchange(open_to_page, "GET", "/v1/models")[1]["vary"] == "origin"
    for served, status in ((open_to_page, 404), (keyed, 401)):
        got, headers, _ = exchange(served, "GET", "/nothing", origin=PAGE)
        assert got == status
        assert "access-control-allow-origin" in headers
        assert ("vary" in headers) == (served is open_to_page), "all pages get the same from *"


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "http://chat.example", "https://chat.example:8443", "null"),
        *("https://chat.example.evil.example", "https://sub.chat.example", "*"),
    ],
)
def test_every_other_page_is_refused(open_to_page: Served, origin: str):
    status, headers, _ = preflight(open_to_page, origin)
    assert status == 403
    assert "access-control-allow-origin" not in headers
    for sent in ({}, {"sec_fetch_site": "cross-site"}):
        status, headers, _ = exchange(open_to_page, "GET", "/v1/models", origin=origin, **sent)
        assert status == 403
        assert "access-control-allow-origin" not in headers
        assert headers["vary"] == "origin", "a cache must not give this to an allowed page"


def test_an_allowed_page_must_still_use_our_name_and_the_key(open_to_page: Served, keyed: Served):
    status, _, _ = exchange(open_to_page, "GET", "/v1/models", origin=PAGE, host="evil.example")
    assert status == 403
    assert exchange(keyed, "GET", "/v1/models", origin=PAGE)[0] == 401
    good = {"origin": PAGE, "authorization": "Bearer right"}
    assert exchange(keyed, "GET", "/v1/models", **good)[0] == 200


def test_without_the_setting_no_page_may_ask():
    with Served(PacedEngine(saying("one"))) as served:
        assert preflight(served, PAGE)[0] == 403
        assert "access-control-allow-origin" not in exchange(served, "GET", "/health")[1]
        assert "vary" not in exchange(served, "GET", "/health")[1]
        assert exchange(served, "OPTIONS", "/v1/models")[0] == 405


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("*", ("*",)),
        ("https://A.example:8443 ,http://b", ("https://a.example:8443", "http://b")),
        ("https://a.example:443,http://b:80", ("https://a.example", "http://b")),
        ("https://a:80,http://b:443,app://c:80", ("https://a:80", "http://b:443", "app://c:80")),
        ("http://[::1]:80,http://[::1]:3000", ("http://[::1]", "http://[::1]:3000")),
        ('["https://a.example", "*"]', ("https://a.example", "*")),
    ],
)
def test_origins_as_operators_write_them(text: str, origins: tuple[str, ...]):
    assert read_origins(text) == origins


@pytest.mark.parametrize(
    "text",
    [
        *("a.example", "https://a.example/", "https://u@a", "[1]", "[", "null"),
        *("https://a:b:c", "https://a:b", "https://a:", "https://a:1:2", "https://::1", "https://"),
    ],
)
def test_what_is_no_origin_is_refused(text: str):
    with pytest.raises(BadInput, match="allowed_origins"):
        read_origins(text)


class _Blank(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page</title>")

    def log_message(self, *said: object) -> None:
        pass


ASKING = """(async () => {
  const answer = await fetch(%s + "/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", authorization: "Bearer right" },
    body: %s,
  });
  document.title = answer.headers.get("x-request-id") + " " + await answer.text();
})().catch((error) => { document.title = "failed: " + error; })"""


@pytest.mark.slow
@pytest.mark.skipif(chromium.path() is None, reason="Chromium is not installed")
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_browser_gives_the_answer_to_allowed_pages_alone(is_allowed: bool):
    other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Blank)
    serving = threading.Thread(target=other.serve_forever)
    serving.start()
    site = f"http://127.0.0.1:{other.server_port}"
    origins = (site,) if is_allowed else ("http://127.0.0.1:1",)
    try:
        with Served(PacedEngine(saying("one two")), origins=origins) as served, Browser() as page:
            page.go(site)
            page.until("document.title === 'a page'")
            page.value(ASKING % (json.dumps(served.url), json.dumps(json.dumps(ASKED))))
            page.until("document.title !== 'a page'")
            title = page.value("document.title")
    finally:
        other.shutdown()
        serving.join()
        other.server_close()
    assert ("one two" in title) == is_allowed, title
    assert title.startswith("failed: ") != is_allowed
    if is_allowed:
        assert len(title.split()[0]) == 32
