"""The application as a part of others': mounted, behind a prefix, with added routes and HEAD."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp

from ess.server.dialects.response_history import owner_of
from ess.server.http.app import DOORS, Application
from ess.server.http.connection.outlets import Straight
from ess.server.http.routes import peer_routes
from ess.server.process.requests.kept_responses import KeptResponse, KeptResponses
from tests.server.harness import PacedEngine, Served, counting, raw, saying, until

ASKED = {"prompt": "a", "max_tokens": 3}


def mounted(prefix: str) -> Callable[[ASGIApp], FastAPI]:
    def within(app: ASGIApp) -> FastAPI:
        parent = FastAPI(openapi_url=None)
        parent.mount(prefix, app)
        return parent

    return within


def got(url: str, body: object = None, *, method: str | None = None, **headers: str) -> Any:
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, sent, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


@pytest.mark.parametrize("prefix", ["/llm", "/v1", "/a/docs"])
def test_it_is_mounted_in_another_application(prefix: str):
    with Served(PacedEngine(saying("one two")), within=mounted(prefix), keys=("k",)) as served:
        url, key = served.url + prefix, {"authorization": "Bearer k"}
        assert got(url + "/health")[0] == got(url + "/docs")[0] == got(url + "/dashboard")[0] == 200
        assert got(url + "/", accept="text/html,*/*;q=0.8")[2] == got(url + "/chat")[2]
        assert got(url + "/")[0] == 404, "no browser"
        assert got(url + "/", {}, accept="text/html")[0] == 404, "/chat takes no form"
        assert got(url + "/v1/models")[0] == got(url + "/nothing")[0] == 401
        code, headers, body = got(url + "/v1/completions", ASKED, **key)
        assert (code, json.loads(body)["object"]) == (200, "text_completion")
        assert headers["x-request-id"]
        document = json.loads(got(url + "/openapi.json", **key)[2])
        assert document["servers"] == [{"url": prefix}]
        assert got(url + "/v1/models/test-model", **key)[0] == 200
        assert "/v1/completions" in document["paths"]
        error = json.loads(got(url + "/chat/completions", {}, **key)[2])["error"]
        assert error["message"].endswith(
            "there is no /chat/completions; did you mean /v1/chat/completions?"
        )
        assert served.service.tally.answers["/v1/completions", 200] == 1
        assert got(served.url + "/v1/models", **key)[0] == 404


@pytest.mark.parametrize("prefix", ["/llm", "/a/b"])
def test_a_proxy_in_front_may_cut_its_prefix_off_or_not(prefix: str):
    with Served(PacedEngine(saying("one")), root_path=prefix) as served:
        for url in (served.url, served.url + prefix):
            for path in ("/v1/models", "/v1/models/test-model", "/docs/page.js"):
                assert got(url + path)[0] == 200, path
            document = json.loads(got(url + "/openapi.json")[2])
            assert document["servers"] == [{"url": prefix}]


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_events_go_straight_to_the_socket(monkeypatch: pytest.MonkeyPatch, prefix: str):
    straight: list[bytes] = []
    write = Straight.write

    def noted(self: Straight, ready: bytes) -> None:
        straight.append(ready)
        write(self, ready)

    monkeypatch.setattr(Straight, "write", noted)
    asked = {**ASKED, "max_tokens": 40, "stream": True, "ignore_eos": True}
    with Served(PacedEngine(counting(40), pace_s=0.002), root_path=prefix) as served:
        code, _, body = got(served.url + "/v1/completions", asked)
        assert (code, body[-16:]) == (200, b"\n\ndata: [DONE]\n\n")
        assert len(straight) > 20


def squeezed(app: ASGIApp) -> ASGIApp:
    async def passed(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    return BaseHTTPMiddleware(GZipMiddleware(app, minimum_size=1), dispatch=passed)


def test_middleware_in_front_sees_every_event():
    asked = {**ASKED, "max_tokens": 40, "stream": True, "ignore_eos": True}
    with Served(PacedEngine(counting(40)), within=squeezed) as served:
        code, _, body = got(served.url + "/v1/completions", asked)
        events = body.decode().split("\n\n")
        assert (code, events[-2:]) == (200, ["data: [DONE]", ""])
        assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-2]) == "a" * 40


def with_more(app: ASGIApp) -> ASGIApp:
    assert isinstance(app, Application)

    @app.get("/mine/{number}")
    async def mine(number: int) -> dict[str, int]:
        return {"number": number}

    return app


def test_routes_of_others_are_fastapi_s():
    with Served(PacedEngine(saying("one")), within=with_more) as served:
        assert json.loads(got(served.url + "/mine/7")[2]) == {"number": 7}
        assert got(served.url + "/mine/seven")[0] == 422
        document = json.loads(got(served.url + "/openapi.json")[2])
        assert document["paths"]["/mine/{number}"]["get"]["parameters"][0]["name"] == "number"
        assert {"HTTPValidationError", "ChatAsk"} <= set(document["components"]["schemas"])


def heads(port: int, paths: list[str]) -> list[int]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as made:
        statuses = []
        for path in paths:
            made.request("HEAD", path)
            answer = made.getresponse()
            assert answer.read() == b""
            statuses.append(answer.status)
    return statuses


def test_head_is_answered_wherever_get_is():
    """But for what only a prefill worker has."""
    doors = [door for door in DOORS if door not in peer_routes.DOORS]
    listed = [(door.methods, path) for door in doors for path in door.paths]
    filled = {"{model:path}": "test-model", "{recording}": "demo.json", "{response_id}": "resp_a"}
    shelf = KeptResponses(100)
    shelf.put(
        owner_of([]), "resp_a", KeptResponse(input_items=b"", output_items=b"", document=b"{}")
    )
    asked = [functools.reduce(lambda p, k: p.replace(k, filled[k]), filled, p) for _, p in listed]
    readable = {path for methods, path in listed if "GET" in methods.split()}
    with Served(PacedEngine(saying("one")), kept=shelf) as served:
        expected = [200 if path in readable else 405 for _, path in listed]
        assert heads(served.port, asked) == expected
        assert got(served.url + "/health", {})[1]["allow"] == "GET, HEAD"
        code, headers, body = got(served.url + "/ping", method="PUT")
        assert (code, headers["allow"]) == (405, "GET, HEAD, POST")
        assert "PUT is not served at /ping; GET and POST are" in body.decode()


def test_a_client_that_leaves_within_its_body_is_no_fault(caplog: pytest.LogCaptureFixture):
    with Served(PacedEngine(saying("one"))) as served:
        with raw(served.port) as made:
            made.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{"
            )
            until(lambda: served.service.tally.connection_count == 1, "the connection")
        until(lambda: served.service.tally.disconnect_count == 1, "the disconnect")
        assert served.service.tally.failure_count == 0
        assert not caplog.records
