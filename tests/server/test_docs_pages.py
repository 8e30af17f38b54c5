"""/docs and /redoc as a reader has them: a real browser, every request counted, nothing let out."""

from __future__ import annotations

import gzip
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from ess.server.http.openapi.pages import LOADED
from tests.server.harness import PacedEngine, Served, saying
from tests.support import chromium
from tests.support.chromium import Browser

needs_chromium = pytest.mark.skipif(chromium.path() is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture
def page(browser: Browser) -> Browser:
    """Each server has an origin of its own, so nothing is kept from one test to the next."""
    browser.leave()
    return browser


def below(prefix: str) -> Callable[[ASGIApp], ASGIApp]:
    def within(app: ASGIApp) -> ASGIApp:
        parent = FastAPI(openapi_url=None)
        parent.mount(prefix, app)
        return parent if prefix else app

    return within


def asked_for(page: Browser) -> list[str]:
    sent = [event for event in page.events if event.get("method") == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


def complaints(page: Browser) -> list[str]:
    """All complaints, except the one about the first request for the document without a key."""
    return [error for error in page.errors() if " 401 " not in error]


def type_key(page: Browser, key: str) -> None:
    page.value(f"document.getElementById('key').value = {json.dumps(key)}")
    page.value("document.querySelector('#ask button').click()")


SHOWS = {
    "/docs": "document.querySelectorAll('.opblock').length",
    "/redoc": "document.querySelectorAll('[data-section-id*=operation], [id*=operation]').length",
}


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "prefix", "keys"),
    [
        ("/docs", "", ()),
        ("/redoc", "", ("right",)),
        ("/redoc", "/llm", ()),
    ],
)
def test_the_page_shows_every_route(page: Browser, path: str, prefix: str, keys: tuple[str, ...]):
    """Every pair of a page, a place and a key, of eight cases in four; the next test is one."""
    with Served(PacedEngine(saying("one")), keys=keys, within=below(prefix)) as served:
        shown(page, served.url, prefix + path, keys=keys)
        assert complaints(page) == []
        assert all(url.startswith((served.url, "data:")) for url in asked_for(page))


def shown(page: Browser, url: str, path: str, *, keys: tuple[str, ...]) -> None:
    page.go(url + path)
    if keys:
        page.until("!document.getElementById('ask').hidden")
        type_key(page, "wrong")
        page.until("document.getElementById('said').textContent.includes('not known')")
        type_key(page, "right")
    page.until(f"{SHOWS['/' + path.rpartition('/')[2]]} > 30")
    assert page.value("document.getElementById('ask').hidden")


@needs_chromium
@pytest.mark.slow
def test_a_route_is_tried_out_with_the_key(page: Browser):
    keys = ("right",)
    with Served(PacedEngine(saying("one")), keys=keys, within=below("/llm")) as served:
        shown(page, served.url, "/llm/docs", keys=keys)
        for part in (".opblock-summary-control", ".try-out__btn", ".execute"):
            part_shown = f"document.querySelector('#operations-status-get_v1_models {part}')"
            page.until(f"{part_shown} !== null")
            page.value(f"{part_shown}.click()")
        page.until("document.body.textContent.includes('\"test-model\"')")
        assert complaints(page) == []
        assert all(url.startswith((served.url, "data:")) for url in asked_for(page))


@needs_chromium
@pytest.mark.slow
def test_the_dashboard_is_alive_below_a_prefix(page: Browser):
    with Served(PacedEngine(saying("one")), within=below("/llm")) as served:
        page.go(served.url + "/llm/dashboard")
        page.until("+document.body.dataset.frames > 1")
        page.go(served.url + "/llm/dashboard?replay=demo.json")
        page.until("document.body.dataset.replayed === ''")
        assert page.errors() == []
        assert all(url.startswith(served.url + "/llm/") for url in asked_for(page))


def test_what_the_pages_load_is_compressed_for_those_who_take_it():
    with Served(PacedEngine(saying("one")), keys=("right",)) as served:
        for path in LOADED:
            plain, packed = (fetched(served.url + path, take) for take in ("identity", "gzip"))
            assert packed == plain
            assert len(plain) > 100


def fetched(url: str, take: str) -> bytes:
    request = urllib.request.Request(url, headers={"accept-encoding": take})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: Any = answer.read()
        return gzip.decompress(body) if answer.headers["content-encoding"] == "gzip" else body
