"""The load: what a client sees of any server, and the figures of it.

No test depends on how fast anything is: times are given by hand, or events are opened in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from ess.bench import cli
from ess.bench.harness.measure.streaming import TimedAnswer, address_of, streamed
from ess.bench.load import offered, prompts
from ess.bench.load.figures import is_good, load_rows
from ess.bench.load.offered import OfferedLoad, Target, offer
from ess.bench.load.prompts import LoadRequest
from ess.errors import BadInput, BadState
from ess.sim.serving.goodput import Objective

EASY = Objective(ttft_s=1e9, tpot_s=1e9)
IDS = np.random.default_rng(0).integers(0, 4096, size=200_000).tolist()


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own reference takes a second to be made into ids."""
    monkeypatch.setattr(prompts, "token_ids", lambda: (IDS, "ids"))


# ---- what a client sees


Answer = Callable[[asyncio.StreamWriter, dict[str, Any]], Coroutine[Any, Any, None]]


def event(text: str, *, finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
    said: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish}]}
    return b"data: " + json.dumps(said | ({"usage": usage} if usage else {})).encode() + b"\n\n"


def chunked(*pieces: bytes, size: int = 0) -> bytes:
    """The pieces as one body; with a size it is cut anywhere."""
    whole = b"".join(pieces)
    cut = [whole[at : at + size] for at in range(0, len(whole), size)] if size else pieces
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in cut)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
}
STREAM = (
    event("a b"),
    event("c d"),
    event("e"),
    event("", finish="length"),
    b'data: {"choices": [], "usage": %s}\n\n' % json.dumps(USAGE).encode(),
    b": a comment\n\n",
    b"data: [DONE]\n\n",
)


async def serving(answer: Answer) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        asked = json.loads(await reader.readexactly(size))
        try:
            await answer(writer, asked | {"head": head.decode()})
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def seen_of(sent: bytes, **more: Any) -> tuple[TimedAnswer, dict[str, Any]]:
    """What the client makes of these bytes, and what it asked."""
    got: list[dict[str, Any]] = []

    async def answer(writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
        got.append(asked)
        writer.write(sent)

    async def run() -> TimedAnswer:
        async for url in serving(answer):
            return await streamed(f"{url}/at/", {"prompt": [1]}, **more)
        raise AssertionError

    return asyncio.run(run()), got[0]


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_tokens_are_what_the_server_counts_and_the_last_event_is_none(size: int) -> None:
    seen, asked = seen_of(chunked(*STREAM, size=size), key="secret")
    assert len(seen.events_s) == 3
    assert (seen.prompt_tokens, seen.cached_tokens, seen.output_tokens) == (9, 4, 5)
    assert seen.events_s == sorted(seen.events_s)
    assert len(seen.gaps_s) == 2
    assert "post /at/v1/completions " in asked["head"]
    assert "authorization: bearer secret\r\n" in asked["head"]


def test_a_body_without_chunks_and_a_server_that_counts_nothing() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    seen, asked = seen_of(head + event("a") + event("b") + b"data: [DONE]\r\n\r\n")
    assert (len(seen.events_s), seen.output_tokens, seen.prompt_tokens) == (2, 2, 0)
    assert "authorization" not in asked["head"]


def test_the_last_token_may_come_with_the_end_and_counts_may_be_left_out() -> None:
    """An event without text is a token whose character is not whole yet; times begin with the
    request, whatever the clock says then."""
    begun_s = time.monotonic()
    usage = b'data: {"choices": null, "usage": {"prompt_tokens_details": null}}\n\n'
    pieces = (event("a"), event(""), event("z", finish="length"), usage, b"data: [DONE]\n\n")
    seen, _ = seen_of(chunked(*pieces))
    assert len(seen.events_s) == 3
    assert (seen.prompt_tokens, seen.counted_tokens, seen.cached_tokens) == (0, 0, 0)
    assert 0 <= seen.first_s <= seen.last_s <= time.monotonic() - begun_s


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_https_is_spoken_where_the_address_says_so(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, Any] = {}

    async def open_connection(host: str, port: int, **more: Any) -> Any:
        opened.update(more, host=host, port=port)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(streamed(f"{scheme}://here:8000", {}))
    assert (opened["host"], opened["port"]) == ("here", 8000)
    assert bool(opened["ssl"]) == (scheme == "https")


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "closed before an answer"),
        (
            b'HTTP/1.1 503 Busy\r\ncontent-length: 9\r\n\r\n{"error": {"message": "no slots"}}',
            "answered 503: no slots",
        ),
        (b"HTTP/1.1 404 Not Found\r\n\r\nnothing here", "answered 404: nothing here"),
        (chunked(event("a"), event("b"))[:-12], "broke off after 1 events"),
        (chunked(event("a")), "broke off after 1 events"),
        (b"nonsense\r\n\r\nand more", "answered without a status: and more"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * (3 << 20), "the head of the answer is longer"),
        (chunked(b"data: [5]\n\n"), "an event is not one of"),
        (chunked(event("a"), b'data: {"error": {"message": "lost"}}\n\n'), "lost"),
    ],
)
def test_what_is_no_whole_answer_is_refused(sent: bytes, says: str) -> None:
    with pytest.raises(BadState, match=says):
        seen_of(sent)


@pytest.mark.parametrize("url", ["", "http://", "ftp://x", "http://x:port", "http://x:0", "::"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="write http://HOST:PORT"):
        address_of(url)


def test_addresses_as_people_write_them() -> None:
    assert address_of("here:8000").netloc == "here:8000"
    assert address_of("https://here/at").netloc == "here:443"
    assert address_of("http://here").netloc == "here:80"
    assert address_of("here/at/v1/").path == "/at"
    assert address_of("http://here//v1").path == ""


def test_the_limit_of_requests_under_way_holds_and_all_are_sent() -> None:
    under_way, peak, held = 0, 0, 3

    async def run() -> OfferedLoad:
        full = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
            nonlocal under_way, peak
            under_way += 1
            peak = max(peak, under_way)
            if under_way == held:
                full.set()
            await full.wait()
            under_way -= 1
            writer.write(chunked(*STREAM))

        async for url in serving(answer):
            return await offer(Target(url, "m"), [LoadRequest(0.0, [1], 5)] * 9, at_most=held)
        raise AssertionError

    done = asyncio.run(run())
    assert (len(done.seen), peak, done.failures) == (9, held, [])


class Jumping(selectors.DefaultSelector):
    """Instead of waiting it says that the time has passed."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(0)


@pytest.mark.parametrize(
    ("at_most", "sent_s", "late_s", "took_s"),
    [(None, [0.0, 1.0, 2.5], [0.0, 0.0, 0.0], 4.5), (1, [0.0, 2.0, 4.0], [0.0, 1.0, 1.5], 6.0)],
)
def test_requests_are_sent_when_they_are_due(
    at_most: int | None,
    sent_s: list[float],
    late_s: list[float],
    took_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes two seconds; one that waits for room in the client is late."""

    async def two_seconds(*_: Any, **__: Any) -> TimedAnswer:
        await asyncio.sleep(2.0)
        return TimedAnswer([2.0])

    clock = Jumping()
    loop = asyncio.SelectorEventLoop(clock)
    monkeypatch.setattr(loop, "time", lambda: clock.now_s)
    monkeypatch.setattr(offered, "streamed", two_seconds)
    asked = [LoadRequest(at_s, [1], 5) for at_s in (0.0, 1.0, 2.5)]
    with contextlib.closing(loop):
        done = loop.run_until_complete(offer(Target("", "m"), asked, at_most=at_most))
    assert (done.sent_s, done.late_s, done.took_s) == (sent_s, late_s, took_s)


def test_failures_are_kept_and_only_a_server_without_answers_is_an_error() -> None:
    async def run(refused: Callable[[int], bool]) -> OfferedLoad:
        async def answer(writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
            assert (asked["model"], asked["temperature"], asked["ignore_eos"]) == ("m", 0, True)
            assert asked["stream_options"] == {"include_usage": True}
            is_refused = refused(asked["prompt"][0])
            full = b"HTTP/1.1 503 -\r\n\r\nfull"
            empty = chunked(b"data: [DONE]\n\n")
            said = empty if asked["prompt"][0] == 3 else full
            writer.write(said if is_refused else chunked(*STREAM))

        async for url in serving(answer):
            return await offer(Target(url, "m"), [LoadRequest(0.0, [n], 5) for n in range(4)])
        raise AssertionError

    done = asyncio.run(run(lambda number: number % 2 == 1))
    empty = "the stream ended without a token"
    assert (len(done.seen), sorted(done.failures)) == (2, ["answered 503: full", empty])
    assert len(done.sent_s) == 2
    assert len(done.late_s) == 4
    with pytest.raises(BadState, match="all 4 requests failed, first: "):
        asyncio.run(run(lambda number: True))


# ---- figures


def load(*seen: TimedAnswer, took_s: float = 10.0, failures: int = 0) -> OfferedLoad:
    return OfferedLoad(
        seen=list(seen),
        sent_s=[0.0] * len(seen),
        late_s=[0.0] * (len(seen) + failures),
        failures=["answered 503"] * failures,
        took_s=took_s,
    )


def seen(*events_s: float, tokens: int = 0, prompt: int = 0, cached: int = 0) -> TimedAnswer:
    return TimedAnswer(
        list(events_s), prompt_tokens=prompt, cached_tokens=cached, counted_tokens=tokens
    )


def by_name(rows: Any) -> dict[str, Any]:
    return {row.name: row for row in rows}


def test_figures_by_hand() -> None:
    """Two tokens an event: 8 tokens in 4 events take 0.3 s after the first, so 300/7 ms each."""
    fast = seen(1.0, 1.1, 1.2, 1.3, tokens=8, prompt=100, cached=64)
    slow = seen(3.0, 4.0, tokens=2, prompt=100)
    rows = by_name(load_rows(load(fast, slow, failures=2), EASY, config={"seed": 0}))
    assert (rows["answered"].value, rows["answered"].baseline_value) == (2, 4)
    assert rows["answered"].config == {"seed": 0, "failed": {"answered 503": 2}}
    assert rows["requests"].value == pytest.approx(0.2)
    assert rows["output"].value == pytest.approx(1.0)
    assert rows["prompts and output"].value == pytest.approx(21.0)
    assert rows["first token, p50"].value == pytest.approx(2000)
    assert rows["first token, p99"].value == pytest.approx(2980)
    assert rows["per further token, p50"].samples == pytest.approx([300 / 7, 1000])
    assert rows["between events, p50"].samples == pytest.approx([100, 100, 100, 1000])
    assert rows["whole answer, p50"].config["max"] == pytest.approx(4000)
    assert rows["in flight, mean"].value == pytest.approx((1.3 + 4.0) / 10)
    assert rows["in flight, mean"].config["peak"] == 2
    assert rows["prompt tokens that were cached"].value == pytest.approx(0.32)


def test_goodput_counts_what_met_both_objectives_over_all_that_was_asked() -> None:
    objective = Objective(ttft_s=1.0, tpot_s=0.1)
    answers = {
        (0.5, 0.6): True,
        (1.0, 1.09): True,
        (1.5, 1.6): False,
        (0.5, 0.7): False,
        (0.5,): True,
    }
    for events_s, good in answers.items():
        assert is_good(seen(*events_s), objective) is good
    served = [seen(*events_s) for events_s in answers]
    row = by_name(load_rows(load(*served, failures=5), objective, config={}))["goodput"]
    assert (row.value, row.baseline_value) == pytest.approx((0.3, 1.0))
    assert row.ratio == pytest.approx(0.3)


def test_a_load_of_single_tokens_has_no_time_between_them() -> None:
    names = by_name(load_rows(load(seen(1.0), seen(2.0)), EASY, config={}))
    assert not [name for name in names if name.startswith(("per further", "between"))]
    assert "prompt tokens that were cached" not in names


def test_another_server_stands_beside() -> None:
    ours, theirs = load(seen(1.0, 1.1)), load(seen(2.0, 2.4), took_s=20.0)
    rows = by_name(load_rows(ours, EASY, config={}, against=theirs))
    assert rows["first token, p50"].ratio == pytest.approx(2)
    assert rows["between events, p99"].ratio == pytest.approx(4)
    assert rows["output"].ratio == pytest.approx(2)
    assert rows["output"].baseline == "the other"


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--url", "ftp://x"), "write http://HOST:PORT"),
        (("--requests", "0"), "0 requests"),
        (("--rate", "0"), "a rate of 0"),
        (("--rate", "nan"), "a rate of nan"),
        (("--burst", "0"), "a burst of 0"),
        (("--prompt", "none"), "--prompt"),
        (("--prompt", "0"), "prompts of 0"),
        (("--at-most", "0"), "--at-most 0"),
        (("--ttft-ms", "-1"), "both must be above 0"),
        (("--seed", "-1"), "a seed of -1"),
        (("--kind", "poem"), "text"),
        (("--file", "no/such.json"), "cannot be read"),
        (("--file", "a", "--trace", "b"), "from one of them"),
    ],
)
def test_wrong_input_is_refused_before_a_server_starts(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["load", *arguments]) == 2
    said = capsys.readouterr()
    assert says in " ".join(said.err.split())
    assert said.out == ""


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["load", "--url", "127.0.0.1:1", "--smoke"]) == 1
    assert "no server at http://127.0.0.1:1: Connection refused" in capsys.readouterr().err


@pytest.fixture
def listening() -> Any:
    """A server in a thread that lists a model and answers completions."""
    urls: list[str] = []
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if head.startswith(b"get"):
            writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [{"id": "m"}]}')
        else:
            size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            writer.write(chunked(*STREAM))
        await writer.drain()
        writer.close()

    async def run() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(over.set))
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(60)
    yield urls[0]
    stop[0]()
    thread.join(60)


def test_a_load_against_two_servers(listening: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["load", "--url", listening, "--against", listening, "--smoke", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["answered"]["value"] == 6
    assert rows["answered"]["config"]["model"] == "m"
    assert rows["output"]["baseline"] == "the other"
    assert rows["prompt tokens that were cached"]["value"] == pytest.approx(4 / 9)
