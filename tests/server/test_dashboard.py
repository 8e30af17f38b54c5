"""The dashboard as an operator has it: a real server under load, a real browser, no mocks."""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ess.engine.process.messages import Status, Traced, TraceSpan
from ess.server.commands.cli import main
from ess.server.commands.planning import planpage
from ess.server.http.routes.trace_routes import trace_document
from ess.server.process.service import Limits
from tests.server import screens
from tests.server.harness import PacedEngine, Served, counting, raw, until
from tests.support import chromium
from tests.support.chromium import Browser
from tests.support.crowd import Crowd
from tests.support.few import few
from tests.support.process import Process

needs_browser = pytest.mark.skipif(
    chromium.path() is None and os.environ.get("BROWSER_TESTS") != "required",
    reason="Chromium is not installed: apt-get install chromium",
)
LONG = ("--max-running", "2", "--max-model-len", "32k", "--modes", "da", "--host-bytes", "1GiB")
DATASET = "document.getElementById('requests').rows"


def metrics(url: str) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def asked(number: int) -> dict:
    """A request that runs longer than the test on any machine: its memory only grows until it is
    aborted."""
    return {
        "prompt": [300 + (number + j * j) % 3000 for j in range(150)],
        "max_tokens": 30_000,
        "ignore_eos": True,
    }


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.mark.slow
@needs_browser
def test_it_is_live_right_and_in_control(page: Browser):
    """Numbers stand between two readings of /metrics; an abort reaches the stream; no error."""
    with (
        Process(*LONG, "--max-waiting", "8").wait_ready() as process,
        Crowd(process.url, [asked(0), asked(1)]) as crowd,
    ):
        until(lambda: all(b'"text"' in text for text in crowd.texts), "two running streams")
        crowd.add(asked(2))
        page.go(process.url + "/dashboard")
        page.until(f"{DATASET}.length === 3 && +document.body.dataset.frames > 4")
        check_numbers(page, process.url)
        check_charts(page)
        check_trace(page)
        check_abort(page, crowd)
        assert page.errors() == []


def check_numbers(page: Browser, url: str) -> None:
    before = metrics(url)
    frame_count = page.value("+document.body.dataset.frames")
    page.until(f"+document.body.dataset.frames > {frame_count + 2}")
    shown = page.value(
        """(() => {
            const pool = (name) => document.querySelector(`[data-pool="${name}"]`).dataset;
            return {
                made: +document.getElementById('totals').dataset.value,
                running: +document.getElementById('running').dataset.value,
                waiting: +document.getElementById('waiting').dataset.value,
                host: +pool('host pages').used, host_most: +pool('host pages').capacity,
                index: +pool('index pages').used, slots: +pool('slots').used,
                slots_most: +pool('slots').capacity,
                limiter: document.getElementById('binds').dataset.limiter,
                rows: [...document.getElementById('requests').rows].map((row) => +row.dataset.made),
            };
        })()"""
    )
    until(lambda: metrics(url)["ess_tokens_total", ""] > shown["made"], "a later reading")
    after = metrics(url)

    def between(name: str, label: str, value: float) -> None:
        low, high = before[name, label], after[name, label]
        assert low <= value <= high, f"{name} {label}: {value} is not within {low}..{high}"

    between("ess_tokens_total", "", shown["made"])
    between("ess_pool_used", "host pages", shown["host"])
    between("ess_pool_used", "index pages", shown["index"])
    assert shown["host_most"] == after["ess_pool_capacity", "host pages"]
    assert shown["running"] == after["ess_requests_running", ""] == 2
    assert shown["waiting"] == after["ess_requests_waiting", ""] == 1
    assert shown["limiter"] in ("sequences", "slots")
    assert after["ess_limiter", shown["limiter"]] == 1.0
    assert sum(shown["rows"]) == shown["made"] > 0
    slots = [value for (name, _), value in after.items() if name == "ess_slots"]
    assert shown["slots_most"] == sum(slots)
    used = [
        sum(v for (n, _), v in read.items() if n == "ess_slots_used") for read in (before, after)
    ]
    assert used[0] <= shown["slots"] <= used[1]


def check_charts(page: Browser) -> None:
    assert page.value("document.getElementById('layers').dataset.modes").split() == ["da"] * 7
    assert page.value("+document.getElementById('heat').dataset.columns") > 2
    assert "step 1:" in page.value("document.getElementById('landed').textContent")
    assert "warm-up on" in page.value("document.getElementById('landed').textContent")
    charts = dict.fromkeys(("layers", "heat", "landing"), 3)
    for name, least in {**charts, "rate-past": 1, "running-past": 1, "hit-past": 1}.items():
        inked = f"""(() => {{
            const canvas = document.getElementById('{name}');
            const dots = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(dots.data.buffer)).size;
        }})()"""
        assert page.value(inked) > least, f"{name} is empty"  # a flat line has few colours
    page.value("document.getElementById('layers').focus()")
    page.press("End")
    assert page.value("document.getElementById('layer').textContent").startswith("Layer 6:")
    page.press("ArrowLeft")
    assert page.value("document.getElementById('layer').textContent").startswith("Layer 5:")


def check_trace(page: Browser) -> None:
    page.value("document.getElementById('trace').click()")
    page.until("document.getElementById('trace').dataset.events")
    events = json.loads(page.downloaded("ess-trace.json"))["traceEvents"]
    lanes = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert {"steps", "stages"} <= set(lanes.values())
    timed = [event for event in events if event["ph"] == "X"]
    steps = [event for event in timed if lanes[event["tid"]] == "steps"]
    stages = [event for event in timed if lanes[event["tid"]] == "stages"]
    assert steps
    assert len({step["name"] for step in steps}) == len(steps), "a step was recorded twice"
    for stage in stages:
        assert any(
            step["ts"] <= stage["ts"] and stage["ts"] + stage["dur"] <= step["ts"] + step["dur"]
            for step in steps
        ), f"{stage} is in no step"


def check_abort(page: Browser, crowd: Crowd) -> None:
    """By keyboard: the first press only arms; the request behind it then gets its turn."""
    button = "[...document.querySelectorAll('#requests button')].find("
    button += "(made) => made.getAttribute('aria-label').endsWith('crowd-00'))"
    page.value(f"{button}.focus()")
    page.press("Enter")
    assert page.value(f"{button}.textContent") == "Sure?"
    assert not crowd.is_over(0)
    page.press("Enter")
    until(lambda: crowd.is_over(0), "the aborted stream")
    assert b'"finish_reason":"abort"' in crowd.texts[0]
    page.until(f"{DATASET}.length === 2")
    until(lambda: b'"text"' in crowd.texts[2], "the request that waited")
    assert not crowd.is_over(1)


@pytest.mark.slow
@needs_browser
def test_a_server_with_a_key_asks_for_it_once(page: Browser):
    page.leave()
    with Served(PacedEngine(counting(10**6), pace_s=0.01), keys=("right",)) as served:
        page.go(served.url + "/dashboard")
        page.until("document.getElementById('ask').open")
        for key, is_open in (("wrong", True), ("right", False)):
            page.value(f"document.getElementById('key').value = '{key}'")
            page.press("Enter")
            page.until(f"document.getElementById('ask').open === {str(is_open).lower()}")
            if is_open:
                page.until("document.getElementById('ask-title').textContent.includes('not known')")
        page.until("+document.body.dataset.frames > 2")
        assert page.value("document.getElementById('state').textContent") == "ready"
    errors = [error for error in page.errors() if "401" not in error]
    assert all("ERR_" in error for error in errors), errors


@pytest.mark.slow
@needs_browser
def test_it_says_when_the_engine_is_loading_silent_or_gone(page: Browser):
    page.leave()
    binds = "document.getElementById('binds').textContent"
    with Served(PacedEngine(counting(1), says_ready=False)) as served:
        page.go(served.url + "/dashboard")
        page.until(f"{binds}.includes('being loaded')")
    with Served(PacedEngine(counting(1))) as served:
        page.go(served.url + "/dashboard")
        page.until(f"{binds}.includes('Nearest limit')")
        served.engine.hold()
        page.until(f"{binds}.includes('said nothing for')")
        served.call(lambda: served.service.link.lose("the engine is gone: it fell over"))
        page.until(f"{binds} === 'The engine is gone: it fell over'")
        assert page.value("document.getElementById('state').dataset.state") == "lost"


DRAWN = """document.body.outerHTML + [...document.querySelectorAll("canvas")]
    .map((canvas) => `${canvas.width}x${canvas.height} ${canvas.toDataURL()}`).join("\\n")"""
PIXELS_MAX = 1e-3
"""Chromium draws single pixels of the same page otherwise, so of pictures so many may differ."""


def settled(page: Browser) -> bytes:
    """The picture of a page that has finished to paint: the same twice in a row."""
    before = page.still()
    for _ in range(50):
        now = page.still()
        if now == before:
            return now
        before = now
    raise AssertionError("the page changes with every picture")


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("size", "phone"), [(screens.DESK, False), (screens.PHONE, True), ((320, 640), True)]
)
def test_a_recording_shows_the_same_again_and_fits(page: Browser, size: tuple, phone: bool):
    page.leave()
    page.resize(*size, phone=phone)
    with Served(PacedEngine(counting(1))) as served:
        pictures, drawn = [], []
        for _ in range(2):
            page.go(f"{served.url}/dashboard?replay={screens.RECORDING}")
            page.until("document.body.dataset.replayed === ''")
            pictures.append(settled(page))
            drawn.append(page.value(DRAWN))
            assert page.value("document.documentElement.scrollWidth") <= size[0]
        assert drawn[0] == drawn[1]
        assert page.differing(*pictures) <= PIXELS_MAX * size[0] * size[1]
        assert page.value("document.getElementById('state').textContent") == "replay"
        assert page.errors() == []


OVERLAPPING = """[...document.querySelectorAll("form input, form select")].filter((one, at, all) =>
  all.slice(at + 1).some((other) => {
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  })).length"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("depths", few([[]], all_of=[[], [*planpage.MTPS]]))
def test_the_planner_s_page_fits_and_its_fields_stand_apart(
    page: Browser, depths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a desk and on a phone, of one page: it takes seconds to plan, for each depth of drafts.
    That of the command line is always there."""
    numbers = functools.partial(planpage.numbers_of, mtps=depths)
    monkeypatch.setattr(planpage, "numbers_of", numbers)
    assert main(["plan", "--ctx", "32k", "--html", str(tmp_path / "plan.html")]) == 0
    for width, phone in ((1280, False), (360, True)):
        page.resize(width, 800, phone=phone)
        page.go((tmp_path / "plan.html").as_uri())
        page.until("document.querySelectorAll('#answer tr').length > 5")
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value(OVERLAPPING) == 0


# ---- without a browser


def ask(url: str, body: bytes | None = None) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def frames(url: str, count: int) -> list[tuple[str, dict]]:
    events, name = [], ""
    with urllib.request.urlopen(url + "/v1/events", timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                events.append((name, json.loads(line[6:])))
                if len(events) == count:
                    break
    return events


def test_events_begin_with_the_past_and_go_on():
    with Served(PacedEngine(counting(1))) as served:
        until(lambda: len(served.service.board.recent) > 3, "a past")
        (first, past), *rest = frames(served.url, 4)
        assert first == "history"
        assert len(past) > 3
        assert [name for name, _ in rest] == ["frame"] * 3
        moments = [frame["at_s"] for _, frame in rest]
        assert moments[0] >= past[-1]["at_s"]
        assert moments == sorted(set(moments)), "a frame came twice"
        assert {(frame["running"], frame["waiting"]) for frame in past} == {(0, 0)}
        until(lambda: not served.service.board._subscribers, "the viewer's leaving")


def test_a_ninth_viewer_is_told_so_and_all_end_with_the_engine():
    with Served(PacedEngine(counting(1))) as served:
        viewers = [urllib.request.urlopen(served.url + "/v1/events", timeout=60) for _ in range(8)]
        code, refused = ask(served.url + "/v1/events")
        assert code == 503
        assert "8 viewers" in refused["error"]["message"]
        served.call(lambda: served.service.link.lose("the engine is gone: it fell over"))
        for viewer in viewers:
            *_, last = [line for line in viewer.read().splitlines() if line.startswith(b"data: ")]
            viewer.close()
            frame = json.loads(last[6:])
            assert (frame["state"], frame["why"]) == ("lost", "the engine is gone: it fell over")


def test_a_viewer_that_takes_nothing_leaves_its_place():
    limits = Limits(running_max=2, waiting_max=2, length_max=4096, stall_s=0.3)
    long = Status(hits=(10**9,) * 20_000, misses=(10**9,) * 20_000)
    with Served(PacedEngine(counting(1), status=long), limits=limits) as served:
        until(lambda: len(served.service.board.recent) > 9, "a past of some megabytes")
        with raw(served.port) as stalled:
            stalled.sendall(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            until(lambda: served.service.board._subscribers, "the viewer")
            until(lambda: not served.service.board._subscribers, "its leaving")
            until(lambda: served.service.tally.refusals["slow_reader"] == 1, "its count")


def test_one_trace_at_a_time_and_none_is_an_answer():
    with Served(PacedEngine(counting(1))) as served:

        def post(path: str) -> tuple[int, dict]:
            return ask(served.url + path, b"")

        assert post("/trace/stop")[0] == 409
        assert post("/trace/start") == (200, {"tracing": True})
        assert post("/trace/start")[0] == 409
        code, document = post("/trace/stop")
        assert (code, document["otherData"]["left_out"]) == (200, 0)
        assert post("/trace/stop")[0] == 409


def test_a_trace_s_form():
    spans = (TraceSpan("steps", "step 1", 0.0, 9.5), TraceSpan("stages", "index L0", 1.5, 2.0))
    document = trace_document(
        Traced((*spans, TraceSpan("steps", "step 2", 9.5, 1.0)), 3), title="x"
    )
    named = [event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"]
    assert named == ["x", "steps", "stages"]
    timed = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [(event["tid"], event["ts"], event["dur"]) for event in timed] == [
        (0, 0.0, 9.5),
        (1, 1.5, 2.0),
        (0, 9.5, 1.0),
    ]
    assert document["otherData"]["left_out"] == 3


def test_the_page_loads_nothing_and_may_speak_to_its_server_only():
    with (
        Served(PacedEngine(counting(1)), keys=("right",)) as served,
        urllib.request.urlopen(served.url + "/dashboard", timeout=60) as answer,
    ):
        text, policy = answer.read().decode(), answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?://|@import|src=|style=", text)


@pytest.mark.parametrize("name", ["nothing.json", "..%2fdashboard.html", "demo.txt", "%2e%2e"])
def test_only_recordings_are_given_out(name: str):
    with Served(PacedEngine(counting(1))) as served:
        assert ask(f"{served.url}/dashboard/{name}")[0] == 404
