"""A worker that tells a router that it is there: a router of ours that may be away, and two stock
routers."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.server.commands.start.settings import resolve
from ess.server.process.pair import registration
from ess.server.process.pair.registration import Entry, Registration, Router, seen_from
from tests.pd.stand import PACED, SECRET
from tests.server.harness import until
from tests.support import routers
from tests.support.process import Process
from tests.support.routers import SGLANG, SMG, Kind, ask

KEY = "for-the-router"


class List(http.server.ThreadingHTTPServer):
    """The workers that a router knows, and what it was asked, `Authorization` included."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.workers: dict[str, dict] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.is_asked = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: List

    def do_GET(self) -> None:
        self.server.is_asked.set()
        self.server.goes_on.wait()
        listed = [{"id": name, **worker} for name, worker in self.server.workers.items()]
        self._answer(200, {"workers": listed})

    def do_POST(self) -> None:
        worker = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.workers[f"id/{len(self.server.asked)}"] = worker
        self._answer(202, {})

    def do_DELETE(self) -> None:
        name = self.path.removeprefix("/workers/").replace("%2F", "/")
        worker = self.server.workers.pop(name, None)
        self._answer(404 if worker is None else 202, {})

    def _answer(self, status: int, document: object) -> None:
        self.server.asked.append((self.command, self.headers["authorization"]))
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def listing(port: int = 0) -> Iterator[List]:
    with List(port) as made:
        serving = threading.Thread(target=made.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield made
        finally:
            made.shutdown()
            serving.join()


@contextlib.contextmanager
def worker(role: str, router: str, log: Path, *flags: str, **environment: str) -> Iterator[Process]:
    words = ("--role", role, "--register", router, *PACED, *flags)
    with log.open("w") as lines:
        given = {"ESS_PEER_SECRET": SECRET, **environment}
        with Process(*words, stderr=lines.fileno(), **given) as process:
            yield process.wait_ready()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_listed_and_leaves(role: str, tmp_path: Path):
    with (
        listing() as router,
        worker(role, router.url, tmp_path / "log", ESS_REGISTER_KEY=KEY) as process,
    ):
        until(lambda: bool(router.workers), "its being listed")
        port = {"bootstrap_port": process.port} if role == "prefill" else {}
        [entry] = router.workers.values()
        assert entry == {"url": process.url, "worker_type": role, **port}
        process.process.send_signal(signal.SIGTERM)
        assert process.ended(30) == 0
        assert router.workers == {}
        assert {given for _, given in router.asked} == {f"Bearer {KEY}"}
    assert KEY not in json.dumps(process.greeting)


@pytest.mark.slow
def test_a_router_that_is_away_keeps_nobody_from_serving(tmp_path: Path):
    """It serves while the router is away before, during and after; when the router is back the
    worker registers again."""
    log = tmp_path / "log"
    with listing() as first:
        port = first.server_address[1]
    with worker("decode", first.url, log) as process:
        asked = {"model": "ess-embedded", "prompt": "a", "max_tokens": 2}
        assert ask(f"{process.url}/v1/completions", asked).status == 200
        for _ in range(2):
            with listing(port) as router:
                until(lambda router=router: bool(router.workers), "its being listed")
            assert ask(f"{process.url}/v1/completions", asked).status == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.ended(30) == 0
    said = log.read_text()
    assert said.count("is not told of this worker: Connection refused") >= 1
    assert said.count(f"knows this worker as {process.url}") >= 1
    assert "cannot be told that this worker leaves" in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SGLANG, SMG], ids=lambda kind: kind.package)
def test_a_stock_router_takes_workers_that_come_by_themselves(kind: Kind, tmp_path: Path):
    with (
        routers.Router(kind, [], tmp_path / "router.txt", "--pd-disaggregation") as router,
        worker("prefill", router.url, tmp_path / "prefill") as prefill,
        worker("decode", router.url, tmp_path / "decode", "--peers", prefill.url[7:]) as decode,
    ):
        until(lambda: router.healthy() == {prefill.url, decode.url}, "both being healthy")
        asked = {"model": "ess-embedded", "prompt": "The server is", "max_tokens": 3}
        assert router.ask("/v1/completions", asked).document["usage"]["completion_tokens"] == 3
        decode.process.send_signal(signal.SIGTERM)
        assert decode.ended(30) == 0
        until(lambda: router.healthy() == {prefill.url}, "its leaving")


@pytest.mark.parametrize(
    "url",
    ["router:80", "https://a:1", "http://", "http://me:secret@a", "http://a:99999", "http://a?b"],
)
def test_an_address_that_is_none(url: str):
    given = {"role": "decode", "peer_secret": SECRET, "register": url}
    with pytest.raises(BadInput, match=r"^register is .*; write http://HOST:PORT$") as refused:
        resolve(given, environment={})
    assert "secret" not in str(refused.value)


def test_who_has_no_role_and_who_gives_a_key_by_a_flag():
    with pytest.raises(BadInput, match="register is for a prefill or a decode worker"):
        resolve({"register": "http://a:1"}, environment={})
    with pytest.raises(
        BadInput,
        match="register_key from flag: others could read it there; set ESS_REGISTER_KEY instead",
    ):
        resolve({"register_key": "k"}, environment={})


def test_who_listens_everywhere_is_known_by_a_reachable_address():
    router = Router("http://127.0.0.1:9", "")
    assert seen_from(router, "http://0.0.0.0:8000") == "http://127.0.0.1:8000"
    assert seen_from(router, "http://10.1.2.3:8000") == "http://10.1.2.3:8000"


def test_nothing_that_was_begun_lists_us_after_we_left():
    """The router takes its time over the question before the listing; meanwhile we leave."""
    with listing() as router:
        entry = Entry(url="http://127.0.0.1:8", worker_type="decode")
        made = Registration(Router(router.url, ""), entry)

        async def work() -> None:
            router.goes_on.clear()
            running = asyncio.ensure_future(made.run())
            await asyncio.to_thread(router.is_asked.wait)
            leaving = asyncio.ensure_future(made.leave())
            await asyncio.sleep(0)
            router.goes_on.set()
            await leaving
            running.cancel()
            await asyncio.wait([running])

        asyncio.run(work())
        assert router.workers == {}
        assert router.asked[-1][0] in ("GET", "DELETE")


def test_whatever_goes_wrong_the_router_is_told_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The system may have no thread left, at first and when the worker leaves."""
    failures: list[Exception] = [RuntimeError("can't start new thread"), ValueError()]

    async def to_thread(work: Callable[[], object]) -> object:
        if failures:
            raise failures.pop(0)
        return work()

    monkeypatch.setattr(registration, "SEE_EVERY_S", 0.0)
    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    with listing() as router:
        entry = Entry(url="http://127.0.0.1:8", worker_type="decode")
        made = Registration(Router(router.url, ""), entry)

        async def work() -> None:
            running = asyncio.ensure_future(made.run())
            while not router.workers:
                assert not running.done(), "the router is not asked any more"
                await asyncio.sleep(0)
            failures.append(RuntimeError("can't start new thread"))
            running.cancel()
            await asyncio.wait([running])
            await made.leave()

        asyncio.run(asyncio.wait_for(work(), 30.0))
    said = capsys.readouterr().err
    assert "is not told of this worker: can't start new thread" in said
    assert "is not told of this worker: ValueError" in said
    assert "cannot be told that this worker leaves: can't start new thread" in said
