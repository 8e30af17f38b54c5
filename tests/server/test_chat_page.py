"""The chat page as a reader has it: a real browser, a server with an engine of invented tokens."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from ess.engine.process.messages import Add
from tests.server.harness import PacedEngine, Served, counting, saying, until
from tests.server.test_dashboard import needs_browser
from tests.support.chromium import Browser

CARDS = "document.querySelectorAll('#log article')"
LAST = "document.querySelector('#log article:last-child > pre')?.textContent"
STATE = "document.getElementById('state').textContent"
SEND = "document.getElementById('send').textContent"
FAILURES = "[...document.querySelectorAll('.error')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(autouse=True)
def _fresh(page: Browser) -> None:
    """The page of the test before would go on asking its server, which has ended."""
    page.go("about:blank")
    page.leave()


def ask(page: Browser, text: str) -> None:
    """By keyboard, once the page may send."""
    page.until("!document.getElementById('send').disabled")
    page.value(f"document.getElementById('question').value = {text!r}")
    page.value("document.getElementById('question').focus()")
    page.press("Enter")


@pytest.mark.slow
@needs_browser
def test_an_answer_is_shown_made_again_and_survives_a_reload(page: Browser):
    """It has a rate once it has come in two pieces."""
    is_begun = threading.Event()

    def said(add: Add) -> Iterator[int]:
        first, following, *rest = saying("fine, thanks")(add)
        yield first
        yield following  # the engine draws it before it sends the first
        assert is_begun.wait(60)
        yield from rest

    with Served(PacedEngine(said)) as served:
        page.go(served.url + "/chat")
        ask(page, "how are you?")
        page.until(f"{LAST}?.length > 0")
        is_begun.set()
        page.until(f"{LAST} === 'fine, thanks' && {SEND} === 'Send'")
        assert page.value("document.querySelector('.figures').textContent").endswith("a second")
        page.value("document.querySelector('.retry').click()")
        page.until(f"{LAST} === 'fine, thanks' && {SEND} === 'Send'")
        assert page.value(f"{CARDS}.length") == 2
        page.go(served.url + "/chat")
        assert page.value(f"{CARDS}.length") == 2
        page.value("Storage.prototype.setItem = () => { throw new Error('no room'); }")
        ask(page, "and now?")
        page.until(f"{CARDS}.length === 4 && {LAST} === 'fine, thanks' && {SEND} === 'Send'")
        page.value("document.getElementById('fresh').click()")
        assert page.value(f"{CARDS}.length") == 0
        assert page.errors() == []


@pytest.mark.slow
@needs_browser
def test_escape_stops_an_answer_and_the_request_behind_it(page: Browser):
    with Served(PacedEngine(counting(10**6), pace_s=0.01)) as served:
        page.go(served.url + "/chat")
        ask(page, "count")
        page.until(f"{LAST}?.length > 10 && {SEND} === 'Stop'")
        page.press("Escape")
        page.until(f"{SEND} === 'Send'")
        assert page.value(FAILURES) == []
        assert len(page.value(LAST)) > 10
        until(lambda: served.engine.aborted, "the end of the request")
        assert page.errors() == []


@pytest.mark.slow
@needs_browser
def test_a_key_is_asked_for_and_a_server_that_goes_is_missed(page: Browser):
    with Served(PacedEngine(saying("hello")), keys=("right",)) as served:
        page.go(served.url + "/chat")
        page.until("document.getElementById('settings').open")
        ask(page, "hi")
        page.until(f"{FAILURES}.some((one) => one.includes('API key'))")
        page.value(
            "const key = document.getElementById('key'); key.value = 'right';"
            "key.dispatchEvent(new Event('change'))"
        )
        page.value("document.querySelector('.retry').click()")
        page.until(f"{LAST} === 'hello'")
        assert page.value(FAILURES) == []
    page.until(f"{STATE} === 'unreachable'")
    assert page.value("document.getElementById('send').disabled")
    assert page.value(LAST) == "hello"


@pytest.mark.slow
@needs_browser
def test_an_answer_that_fails_midway_keeps_what_came_and_can_be_made_again(page: Browser):
    with Served(PacedEngine(counting(10**6), pace_s=0.01)) as served:
        page.go(served.url + "/chat")
        ask(page, "count")
        page.until(f"{LAST}?.length > 10")
        served.call(lambda: [each.transport.abort() for each in served.connections])
        page.until(f"{FAILURES}.length === 1 && {SEND} === 'Send'")
        assert page.value(FAILURES)[0] in ("the connection broke", "the answer ended early")
        assert len(page.value(LAST)) > 10
        page.until("!document.getElementById('send').disabled")
        page.value("document.querySelector('.retry').click()")
        page.until(f"{LAST}?.length > 10 && {SEND} === 'Stop' && !{FAILURES}.length")
        served.call(lambda: served.service.link.lose("the engine fell over"))
        page.until(f"{FAILURES}.some((one) => one.includes('fell over')) && {SEND} === 'Send'")
        assert len(page.value(LAST)) > 10


@pytest.mark.slow
@needs_browser
def test_text_of_any_script_is_shown_as_it_is(page: Browser):
    """Markup stays text, and each paragraph runs in its own direction. What came in several frames
    lies in several texts, so a line has several parts."""
    text = "\u05e9\u05dc\u05d5\u05dd\nif a < b:\n    <b>x</b> & ```\n\u4e2d\u6587\uff0c"
    edges = """(() => {
      const pre = document.querySelector('#log article:last-child > pre');
      const all = document.createRange(), box = pre.getBoundingClientRect();
      all.selectNodeContents(pre);
      const parts = [...all.getClientRects()].filter((one) => one.width);
      const line = (of) => parts.filter((one) => Math.abs(one.top - of.top) < of.height / 2);
      const right = Math.max(...line(parts[0]).map((one) => one.right));
      const left = Math.min(...line(parts.at(-1)).map((one) => one.left));
      return [box.right - right < 2, left - box.left < 2];
    })()"""
    with Served(PacedEngine(saying(text))) as served:
        page.go(served.url + "/chat")
        ask(page, "hi")
        page.until(f"{SEND} === 'Send' && document.querySelector('.figures').textContent")
        assert page.value(LAST) == text
        assert page.value(edges) == [True, True]
        assert page.value("document.querySelectorAll('#log b').length") == 0
        assert page.errors() == []


def test_the_page_loads_nothing_and_may_speak_to_its_server_only():
    with (
        Served(PacedEngine(counting(1)), keys=("right",)) as served,
        urllib.request.urlopen(served.url + "/chat", timeout=60) as answer,
    ):
        text, policy = answer.read().decode(), answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?://|@import|src=|style=", text)
