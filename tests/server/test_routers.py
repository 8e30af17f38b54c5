"""The stock routers before two workers: real processes, each router with its own command line.

Routers of one pool, without a split into prefill and decode. What docs/serving.md advises for each
is what they are started with here.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ess.ports import kept_port
from tests.server.harness import until
from tests.support.crowd import Crowd
from tests.support.few import few
from tests.support.process import Process
from tests.support.routers import ADVISED, SGLANG, SMG, VLLM, Asked, Kind, Router, Worker, ask

pytestmark = pytest.mark.slow

KINDS = [SGLANG, SMG, VLLM]
RUNNING = 4
SHORT = {"model": "ess-embedded", "prompt": "The server is", "max_tokens": 5}
CHAT = {
    "model": "ess-embedded",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 5,
}
ENDLESS = {"model": "ess-embedded", "prompt": "a", "max_tokens": 30_000, "ignore_eos": True}
LONG = ("--max-model-len", "32k", "--host-bytes", "1GiB")
TRACE = "0af7651916cd43dd8448eb211c80319c"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Front:
    """`probed` is what the router asked of each worker by itself."""

    kind: Kind
    router: Router
    workers: tuple[Worker, Worker]
    probed: tuple[list[Asked], ...] = ()


@contextlib.contextmanager
def started(
    kind: Kind, folder: Path, *flags: str, router: tuple[str, ...] = ADVISED
) -> Iterator[Front]:
    """The left worker's port stays its own when it is killed."""
    with (
        kept_port("127.0.0.1") as port,
        Worker(folder / "left.txt", *LONG, *flags, "--port", str(port)) as left,
        Worker(folder / "right.txt", *LONG, *flags) as right,
        Router(kind, [left.url, right.url], folder / "router.txt", *router) as front,
    ):
        yield Front(kind, front, (left, right))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.package)
def front(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    """Probes as they are by default, no breaker, and no queue at the workers."""
    folder, flags = tmp_path_factory.mktemp("front"), ("--max-waiting", "0", "--pace-ms", "20")
    with started(request.param, folder, *flags, router=("--disable-circuit-breaker",)) as made:
        probed = tuple(probes(made.kind, worker) for worker in made.workers)
        yield replace(made, probed=probed)


def probes(kind: Kind, worker: Worker) -> list[Asked]:
    """Before anybody else asks: what the router asks when it starts, and what it asks again."""

    def asked() -> list[Asked]:
        return [each for each in worker.asked if each.route != "/ready"]

    until(lambda: kind.probes <= {each.route for each in asked()}, "all that it asks")
    until(lambda: worker.count("/health") >= 3, "repeated probes")
    return asked()


def test_a_router_asks_only_what_we_answer(front: Front):
    for asked in front.probed:
        assert {each.route for each in asked} == front.kind.probes
        assert {(each.method, each.status) for each in asked} == {("GET", "200")}
    [listed] = front.router.ask("/v1/models").document["data"]
    assert listed["id"] == "ess-embedded"


def test_answers_and_what_they_are_asked_for_pass(front: Front):
    chat = front.router.ask("/v1/chat/completions", CHAT).document
    assert chat["usage"]["completion_tokens"] == 5
    assert chat["choices"][0]["message"]["content"]
    whole = front.router.ask("/v1/completions", {**SHORT, "n": 2, "logprobs": 2}).document
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert all(len(choice["logprobs"]["tokens"]) == 5 for choice in whole["choices"])
    said = whole["choices"][0]["logprobs"]
    for token, top in zip(said["tokens"], said["top_logprobs"], strict=True):
        assert len(top) == 2 + (token not in [*top][:2])
        assert token in top
    scored = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 3}
    for choice in front.router.ask("/v1/chat/completions", scored).document["choices"]:
        assert [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]] == [3] * 5
    refused = front.router.ask("/v1/chat/completions", {**CHAT, "tools": [TOOL]})
    assert (refused.status, refused.document["error"]["param"]) == (400, "tools")


def test_streams_pass_as_they_are_made(front: Front):
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    answer = front.router.ask("/v1/chat/completions", {**CHAT, **usage})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert answer.events[-2]["choices"][0]["finish_reason"] == "length"
    assert answer.events[-1]["usage"]["completion_tokens"] == 5
    events = front.router.ask("/v1/completions", {**SHORT, **usage}).events
    assert events[-1]["usage"]["completion_tokens"] == 5
    with Crowd(front.router.url, [ENDLESS]) as going:
        until(lambda: b'"text"' in going.texts[0], "a first token long before the last")
        assert not going.is_over(0)
    until(
        lambda: not any(w.open_count for w in front.workers), "the end of streams without a reader"
    )


def test_generate_passes(front: Front):
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    whole = front.router.ask("/generate", asked).document
    assert len(whole["output_ids"]) == whole["meta_info"]["completion_tokens"] == 3
    events = front.router.ask("/generate", {**asked, "stream": True}).events
    assert len(events[-1]["output_ids"]) == 3
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_token_ids_as_a_prompt_pass_one_router(front: Front):
    status = front.router.ask("/v1/completions", {**SHORT, "prompt": [5, 6, 7]}).status
    assert status == (200 if front.kind.is_open else 422 if front.kind is SGLANG else 400)


def test_a_request_keeps_its_id_and_its_trace(front: Front):
    name, parent = f"mine-{front.kind.package}", f"00-{TRACE}-b7ad6b7169203331-01"
    answer = front.router.ask("/v1/completions", SHORT, x_request_id=name, traceparent=parent)
    assert answer.headers["x-request-id"] == name
    assert answer.document["id"].endswith(name)
    assert answer.headers["traceparent"].split("-")[1] == TRACE
    until(lambda: name in {a.name for w in front.workers for a in w.asked}, "its line in a log")


def test_prefixes_are_flushed_everywhere_and_aborts_reach_one(front: Front):
    assert front.router.ask("/flush_cache", {}).status == 200
    until(lambda: all(w.count("/flush_cache") == 1 for w in front.workers), "flushes")
    status = front.router.ask("/abort_request", {"rid": "nobody"}).status
    assert status == (200 if front.kind.is_open else 404)


def test_a_client_s_host_name_is_no_matter(front: Front):
    """Requests reach the keyless workers under their own addresses, whatever host name the router
    has."""
    for path, body in (("/v1/models", None), ("/v1/completions", SHORT)):
        assert front.router.ask(path, body, Host="llm.example.com").status == 200
    page = {"Host": "llm.example.com", "Origin": "http://llm.example.com"}
    status = front.router.ask("/v1/completions", SHORT, **page).status
    assert status == (403 if front.kind.is_open else 200)


@contextlib.contextmanager
def full(*workers: Worker) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for worker in workers:
            until(lambda worker=worker: not worker.open_count, "the end of what was asked before")
            held.enter_context(Crowd(worker.url, [ENDLESS] * RUNNING))
            until(lambda worker=worker: worker.open_count == RUNNING, "a full worker")
        yield
    until(lambda: not any(worker.open_count for worker in workers), "room again")


def test_a_full_worker_s_requests_go_elsewhere(front: Front):
    left, _ = front.workers
    with full(left):
        assert [front.router.ask("/v1/completions", SHORT).status for _ in range(4)] == [200] * 4
    until(lambda: left.count("/v1/completions", "503") >= 1, "the line of a refusal")


def test_full_workers_are_a_503_that_says_when(front: Front):
    with full(*front.workers):
        for streams in (False, True) * 6:
            answer = front.router.ask("/v1/completions", {**SHORT, "stream": streams})
            assert (answer.status, answer.headers["x-ess-reason"]) == (503, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
    assert [front.router.ask("/v1/completions", SHORT).status for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("kind", few([VLLM], all_of=KINDS), ids=lambda kind: kind.package)
def test_a_breaker_that_refusals_opened_closes_soon(kind: Kind, tmp_path: Path):
    """A router's breaker counts our 503 as a failure; by default it stays open for a minute."""
    with started(kind, tmp_path, "--max-waiting", "0", "--pace-ms", "20") as front:
        with full(*front.workers):
            answers = [front.router.ask("/v1/completions", SHORT) for _ in range(12)]
            assert {answer.status for answer in answers} == {503}
            assert any(answer.headers["x-ess-reason"] is None for answer in answers), "none opened"
        until(lambda: front.router.ask("/v1/completions", SHORT).status == 200, "a served request")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.package)
def test_a_killed_worker_costs_its_streams_and_no_request(kind: Kind, tmp_path: Path):
    with started(kind, tmp_path, "--max-running", "32", "--pace-ms", "20") as front:
        left, right = front.workers

        def call(number: int) -> int:
            if number == 12:
                left.process.kill()
            return front.router.ask("/v1/completions", {**SHORT, "max_tokens": 20}).status

        with Crowd(front.router.url, [ENDLESS] * 4) as going:
            until(lambda: left.open_count == right.open_count == 2, "two streams each")
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(call, range(40))) == [200] * 40
            until(lambda: sum(map(going.is_over, range(4))) == 2, "the dead worker's streams")
            over = [going.texts[i] for i in range(4) if going.is_over(i)]
            assert not any(b'"length"' in text for text in over)
            assert [b"error" in text for text in over] == [kind is SMG] * 2
            assert right.open_count == 2
        until(lambda: front.router.healthy() == {right.url}, "its being left out")
        with Worker(tmp_path / "again.txt", "--port", left.port) as again:

            def is_used() -> bool:
                assert front.router.ask("/v1/completions", SHORT).status == 200
                return again.count("/v1/completions") > 0

            until(is_used, "its being used again")


@pytest.mark.parametrize("kind", few([SGLANG], all_of=KINDS), ids=lambda kind: kind.package)
def test_a_draining_worker_gets_nothing_new_and_ends_what_it_has(kind: Kind, tmp_path: Path):
    drains = ("--drain-grace-s", "60", "--drain-s", "60", "--pace-ms", "20")
    with started(kind, tmp_path, *drains) as front:
        left, right = front.workers
        with Crowd(front.router.url, [{**ENDLESS, "max_tokens": 300}] * 2) as going:
            until(lambda: left.open_count == right.open_count == 1, "a stream each")
            left.process.send_signal(signal.SIGTERM)
            while front.router.healthy() != {right.url}:
                assert front.router.ask("/v1/completions", SHORT).status == 200
            names = {f"late-{number}" for number in range(6)}
            for name in names:
                assert front.router.ask("/v1/completions", SHORT, x_request_id=name).status == 200
            until(lambda: names <= {asked.name for asked in right.asked}, "their lines")
            assert not names & {asked.name for asked in left.asked}
            until(lambda: all(map(going.is_over, range(2))), "both streams' ends")
            assert all(text.endswith(b"data: [DONE]\n\n") for text in going.texts)
            assert all(b'"finish_reason":"length"' in text for text in going.texts)
        assert left.status("/health") == 200
        until(lambda: left.count("/ready", "503") >= 3, "refused probes")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.package)
def test_a_rolling_update_fails_no_request(kind: Kind, tmp_path: Path):
    """One worker after the other drains, ends and comes back at its port, under load."""
    drains = ("--drain-grace-s", "10", "--drain-s", "60", "--pace-ms", "20", "--max-running", "32")
    bodies = [{**SHORT, "max_tokens": 40}, {**SHORT, "max_tokens": 40, "stream": True}]
    over = threading.Event()

    def call_on(number: int) -> list[str]:
        """Sends requests one after the other; returns those that failed."""
        failures, body = [], bodies[number % 2]
        while not over.is_set():
            answer = front.router.ask("/v1/completions", body)
            is_whole = answer.text.endswith("data: [DONE]\n\n") or not body.get("stream")
            if answer.status != 200 or not is_whole or '"error":' in answer.text:
                failures.append(f"{answer.status} {answer.text[-300:]}")
        return failures

    with started(kind, tmp_path, *drains) as front, ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call_on, number) for number in range(8)]
        with contextlib.ExitStack() as replaced:
            replaced.callback(over.set)
            for number, old in enumerate(front.workers):
                until(lambda old=old: old.count("/v1/completions") > 4, "its use")
                old.process.send_signal(signal.SIGTERM)
                assert old.process.wait(timeout=120) == 0
                log = tmp_path / f"new-{number}.txt"
                new = replaced.enter_context(Worker(log, *LONG, *drains, "--port", old.port))
                until(lambda new=new: new.count("/v1/completions") > 4, "the new one's use")
            over.set()
            assert [call.result() for call in calls] == [[]] * 8


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.package)
def test_the_client_s_key_reaches_the_workers(kind: Kind, tmp_path: Path):
    """The router is given the key for what it asks of itself."""
    known, unknown = {"Authorization": "Bearer secret"}, {"Authorization": "Bearer other"}
    with Worker(tmp_path / "worker.txt", "--api-key", "secret") as worker:
        log = tmp_path / "router.txt"
        with Router(kind, [worker.url], log, *ADVISED, key="secret") as router:
            assert router.ask("/v1/completions", SHORT, **known).status == 200
            assert router.ask("/v1/completions", SHORT, **unknown).status == 401
            assert router.ask("/v1/completions", SHORT).status == 401
            flushed = router.ask("/flush_cache", {}, **known).status
            assert flushed == (500 if kind is VLLM else 200)


def test_smg_reads_the_load_of_a_worker(tmp_path: Path):
    with (
        Worker(tmp_path / "worker.txt", *LONG, "--pace-ms", "20") as worker,
        Crowd(worker.url, [ENDLESS] * (RUNNING + 2)),
    ):
        until(lambda: worker.open_count == RUNNING + 2, "running and waiting requests")
        with Router(SMG, [worker.url], tmp_path / "router.txt") as router:

            def told() -> dict:
                [about] = router.ask("/workers").document["workers"]
                [load] = about.get("engine_load", {}).get("loads", [{}])
                return load

            def counts() -> tuple[int, ...]:
                return tuple(told().get(f"num_{which}_reqs") for which in ("running", "waiting"))

            # It asks again every 10 s; what the worker says is a moment old.
            until(lambda: counts() == (RUNNING, 2), "the load")
            assert told()["max_running_requests"] == RUNNING
            assert not worker.count("/metrics"), "it had to guess"


def test_tokens_are_those_of_a_direct_request(tmp_path: Path):
    asked = {**SHORT, "max_tokens": 24, "temperature": 0}
    given = {"text": "The server is", "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    with Process(stderr=2).wait_ready() as worker:
        direct = ask(f"{worker.url}/v1/completions", asked).document["choices"][0]["text"]
        ids = ask(f"{worker.url}/generate", given).document["output_ids"]
        assert len(direct) > 20
        assert len(ids) == 24
        for kind in KINDS:
            log = tmp_path / f"{kind.package}.txt"
            with Router(kind, [worker.url], log, *ADVISED) as router:
                whole = router.ask("/v1/completions", asked).document
                assert whole["choices"][0]["text"] == direct
                events = router.ask("/v1/completions", {**asked, "stream": True}).events
                assert "".join(event["choices"][0]["text"] for event in events) == direct
                assert router.ask("/generate", given).document["output_ids"] == ids
