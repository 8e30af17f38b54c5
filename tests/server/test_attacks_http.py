"""What strangers send before a key is looked at: little memory, little time, an answer in JSON."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from ess.server.http.connection import protocol
from ess.server.http.connection.protocol import LimitedProtocol
from ess.server.http.connection.received_body import Body
from ess.server.process.bounds import BODIES_MAX, HEADERS_MAX, PIPELINED_MAX, PROBE_CONNECTIONS
from ess.server.process.service import Limits
from tests.attacks.processes import peak_bytes
from tests.attacks.wire import (
    CHUNKED,
    FRAMINGS,
    MIB,
    ONE_BYTE_CHUNKS,
    chunk,
    completion,
    head,
    parsed,
    post,
    pour,
    reply,
    rest,
)
from tests.server.harness import PacedEngine, Served, counting, raw, saying, until
from tests.support.process import Process

LIMITS = Limits(running_max=2, waiting_max=1, length_max=4096, keep_alive_s=0.1, stall_s=0.5)


# ---- memory


@pytest.fixture(scope="module", params=["with a key", "without"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Process]:
    key = ("--api-key", "right") if request.param == "with a key" else ()
    with Process("--engine", "paced", *key) as made:
        yield made.wait_ready()


@pytest.mark.parametrize("name", FRAMINGS)
def test_nothing_of_what_strangers_send_is_kept(guarded: Process, name: str):
    """Three connections send up to 100 MB each, for as long as they are let."""
    before = peak_bytes(guarded.process.pid)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            made = held.enter_context(raw(guarded.port))
            made.settimeout(0.5)
            pour(made, FRAMINGS[name])
        assert guarded.status("/health") == 200
    assert peak_bytes(guarded.process.pid) - before < 24 * MIB


def test_millions_of_chunks_of_one_byte_cost_a_bounded_body(guarded: Process):
    before = peak_bytes(guarded.process.pid)
    with raw(guarded.port) as made:
        key = b"authorization: Bearer right\r\ntransfer-encoding"
        made.sendall(CHUNKED.replace(b"transfer-encoding", key))
        pour(made, ONE_BYTE_CHUNKS)
        code, told = reply(made)
        assert (code, "chunks that are too small" in told["error"]["message"]) == (400, True)
    assert peak_bytes(guarded.process.pid) - before < 24 * MIB


def test_all_bodies_together_are_bounded():
    limits = Limits(running_max=2, waiting_max=2, length_max=4096, body_max=1000)
    unfinished = post(b"x" * 1000)[:-1]
    with Served(PacedEngine(counting(2)), limits=limits) as served, contextlib.ExitStack() as held:
        for _ in range(BODIES_MAX):
            held.enter_context(raw(served.port)).sendall(unfinished)
        refusals = served.service.tally.refusals

        def one_more() -> tuple[int, dict]:
            with raw(served.port) as made:
                made.sendall(post(b"x" * 1000))
                return reply(made)

        until(lambda: one_more()[0] == 503, "the most")
        assert one_more()[1]["error"]["code"] == "bodies"
        assert refusals["bodies"] >= 1
        held.close()
        until(lambda: one_more()[0] == 400, "room again")


# ---- bounds


def test_chunks_as_clients_send_them_are_read():
    body = completion()
    pieces = [b"%x;ext=1\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body))]
    with Served(PacedEngine(saying("one"))) as served, raw(served.port) as made:
        made.sendall(CHUNKED + b"".join(pieces) + b"0\r\nx-sum: 1\r\n\r\n")
        assert reply(made)[0] == 200
        made.sendall(head())
        assert reply(made)[0] == 200


def test_a_trailer_is_no_header():
    with Served(PacedEngine(counting(2)), keys=("right",)) as served, raw(served.port) as made:
        made.sendall(CHUNKED + b"0\r\nauthorization: Bearer right\r\n\r\n")
        assert reply(made)[0] == 401


def test_framing_beyond_its_most_is_named():
    """What comes in one read with the head is not counted: up to 256 KiB on a busy machine."""
    with Served(PacedEngine(counting(2))) as served, raw(served.port) as made:
        made.sendall(CHUNKED)
        pour(made, [b"0\r\n", *[b"t: " + b"v" * 100 + b"\r\n"] * 4000])
        code, error = parsed(rest(made))
        assert (code, "16,384 bytes" in error["message"]) == (400, True)


def test_more_headers_than_the_bound_are_refused():
    with Served(PacedEngine(counting(2))) as served:
        for count, code in ((HEADERS_MAX - 1, 200), (HEADERS_MAX, 431)):
            with raw(served.port) as made:
                made.sendall(head("/version", *["a: b"] * count))
                assert reply(made)[0] == code


def test_waiting_requests_of_a_connection_are_bounded():
    """The few are answered in order; the many end the connection, and what ran for it."""
    engine = PacedEngine(counting(10**6), pace_s=0.01)
    with Served(engine, limits=LIMITS) as served:
        with raw(served.port) as made:
            made.sendall(head() * PIPELINED_MAX)
            until(lambda: served.service.tally.answers["/version", 200] == PIPELINED_MAX)
        with raw(served.port) as made:
            made.sendall(post(completion(max_tokens=3000, stream=True)))
            assert made.recv(1 << 16).startswith(b"HTTP/1.1 200")
            made.sendall(head() * (PIPELINED_MAX + 1))
            told = rest(made)
            assert b"[DONE]" not in told
            assert b"HTTP/1.1" not in told
        until(lambda: served.service.link.open_count == 0, "the end of what ran")


def test_who_leaves_ends_the_request_before_the_waiting_one(caplog: pytest.LogCaptureFixture):
    engine = PacedEngine(counting(10**6), pace_s=0.05)
    with Served(engine, limits=LIMITS) as served:
        with raw(served.port) as made:
            made.sendall(post(completion(max_tokens=3000, stream=True)))
            assert made.recv(1 << 16)
            made.sendall(head())
            until(lambda: any(c.pipeline for c in served.connections), "a request that waits")
        until(lambda: served.service.link.open_count == 0, "the end of what ran")
        until(lambda: served.service.tally.disconnect_count == 1, "its count")
    assert not caplog.text


@pytest.mark.parametrize(
    "offer",
    [
        head("/v1/completions", "connection: Upgrade", "upgrade: websocket"),
        b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_no_websocket_and_no_tunnel(offer: bytes, caplog: pytest.LogCaptureFixture):
    with Served(PacedEngine(counting(2))) as served, raw(served.port) as made:
        made.sendall(offer)
        code, error = parsed(rest(made))
        assert (code, "no WebSocket" in error["message"]) == (400, True)
    assert "pip" not in caplog.text


@pytest.mark.parametrize("cut", [0, 3])
def test_an_offer_of_http_2_is_passed_over_and_the_body_is_read(cut: int):
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMA")
    sent = post(completion(), *offer)
    with Served(PacedEngine(saying("one"))) as served, raw(served.port) as made:
        made.sendall(sent[: len(sent) - cut])
        if cut:
            until(lambda: any(c.cycle for c in served.connections), "the head")
            made.sendall(sent[-cut:])
        assert reply(made)[0] == 200
        made.sendall(head())
        assert reply(made)[0] == 200


def test_nobody_is_told_to_send_what_is_refused():
    """Nor is a length believed that no number can hold."""
    with Served(PacedEngine(counting(2))) as served:
        for length, codes in ((1 << 40, {413}), (10**30, {400}), (-1, {400})):
            with raw(served.port) as made:
                wanted = ("expect: 100-continue", f"content-length: {length}")
                made.sendall(head("/v1/completions", *wanted, method="POST"))
                assert parsed(rest(made))[0] in codes
        with raw(served.port) as made:
            sent = post(completion(), "expect: 100-continue")
            made.sendall(sent[: -len(completion())])
            assert made.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"


# ---- time


def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Body, "within_s", 0.2)
    with Served(PacedEngine(counting(2))) as served, raw(served.port) as made:
        made.sendall(post(completion())[:-1])
        code, error = parsed(rest(made))
        assert (code, "65,536 bytes per second" in error["message"]) == (408, True)
        until(lambda: served.service.tally.answers["other", 499] == 1, "its end")


def test_a_body_that_comes_has_time(monkeypatch: pytest.MonkeyPatch):
    """Its bytes buy the seconds: at this rate each is worth more than the test takes."""
    checks, check = [], LimitedProtocol._check_body

    def noted(self: LimitedProtocol) -> None:
        checks.append(check(self))

    monkeypatch.setattr(Body, "within_s", 0.01)
    monkeypatch.setattr(Body, "rate_min", 1 / 60)
    monkeypatch.setattr(LimitedProtocol, "_check_body", noted)
    with Served(PacedEngine(saying("one"))) as served, raw(served.port) as made:
        sent = post(completion())
        made.sendall(sent[:-1])
        until(lambda: bool(checks), "a look at the clock")
        made.sendall(sent[-1:])
        assert reply(made)[0] == 200


def test_blank_lines_do_not_use_a_connection():
    with Served(PacedEngine(counting(2)), idle_s=1) as served, raw(served.port) as made:
        made.sendall(head())
        assert reply(made)[0] == 200
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                made.sendall(b"\r\n")
                threading.Event().wait(0.01)
        until(lambda: served.service.tally.connection_count == 0, "the end of the connection")


@pytest.mark.parametrize(("keys", "code"), [(("right",), 401), ((), 413)])
def test_an_answer_before_the_body_is_the_last(keys: tuple[str, ...], code: int):
    """The client reads it although it has more to send, then the connection ends."""
    with Served(PacedEngine(counting(2)), keys=keys) as served, raw(served.port) as made:
        made.sendall(head("/v1/completions", "content-length: 99999999", method="POST"))
        assert pour(made, [b" " * MIB] * 8) == 8 * MIB
        told = rest(made)
        assert parsed(told)[0] == code
        assert b"connection: close" in told
        made.close()
        until(lambda: served.service.tally.connection_count == 0, "the end of the connection")


def test_who_only_sends_after_a_refusal_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    with Served(PacedEngine(counting(2)), keys=("right",)) as served, raw(served.port) as made:
        made.sendall(CHUNKED)
        assert parsed(rest(made))[0] == 401
        until(lambda: served.service.tally.connection_count == 0, "the end of the connection")
        assert pour(made, [chunk(1000)] * 100) < 100_000


def test_who_reads_nothing_of_many_answers_is_cut_off():
    limits = Limits(running_max=2, waiting_max=1, length_max=4096, stall_s=0.2)
    with Served(PacedEngine(counting(2)), limits=limits) as served, socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", served.port))
        answers = served.service.tally.answers
        for count in range(1, 1000):
            made.sendall(head("/dashboard"))
            until(lambda n=count: answers["/dashboard", 200] == n or served.is_held_back)
            if served.is_held_back:
                break
        until(lambda: served.service.tally.connection_count == 0, "the end of the connection")


def test_a_client_that_leaves_in_its_body_is_counted(caplog: pytest.LogCaptureFixture):
    with Served(PacedEngine(counting(2))) as served:
        with raw(served.port) as made:
            made.sendall(post(completion())[:-1])
            until(lambda: any(c.cycle for c in served.connections), "the head")
        tally = served.service.tally
        until(lambda: tally.answers["other", 499] == 1, "its end")
        assert (tally.failure_count, tally.disconnect_count) == (0, 1)
    assert not caplog.text


# ---- crowds


def test_probes_are_answered_while_connections_are_hoarded():
    """Silent clients hold more than all places, and further clients keep coming."""
    with Served(PacedEngine(counting(2)), connections_max=3) as served:
        with contextlib.ExitStack() as held:
            for _ in range(3 + 2 * PROBE_CONNECTIONS):
                held.enter_context(raw(served.port))
            for path in ("/health", "/ready", "/metrics", "/health"):
                with raw(served.port) as made:
                    made.sendall(head(path))
                    assert rest(made).startswith(b"HTTP/1.1 200"), path
            with raw(served.port) as made:
                made.sendall(head("/version"))
                assert parsed(rest(made))[1]["code"] == "connections"
            assert served.service.tally.connection_count <= 3 + PROBE_CONNECTIONS
        until(lambda: served.service.tally.connection_count == 0, "room again")
        with raw(served.port) as made:
            made.sendall(head())
            assert reply(made)[0] == 200


def test_a_crowd_at_a_real_server_leaves_its_probes_alive():
    flags = ("--engine", "paced", "--max-connections", "8", "--allowed-hosts", "llm.example")
    with Process(*flags).wait_ready() as process, contextlib.ExitStack() as held:
        until(lambda: process.status("/version") == 200, "room")
        for _ in range(100):
            pour(held.enter_context(raw(process.port)), [CHUNKED[:-4]])
        assert [process.status(path) for path in ("/health", "/ready", "/version")] == [
            200,
            200,
            503,
        ]
        held.close()
        until(lambda: process.status("/version") == 200, "room again")
        for name, code in (("llm.example", 200), ("evil.example", 403)):
            assert answered(process.port, "GET", "/version", [f"host: {name}"])[0] == code


def test_a_place_for_probes_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "PROBE_HEAD_S", 0.05)
    with Served(PacedEngine(counting(2)), connections_max=1) as served, raw(served.port) as first:
        first.sendall(head())
        assert first.recv(1 << 16)
        with raw(served.port) as made:
            assert parsed(rest(made))[1]["code"] == "connections"


# ---- pages

FOREIGN = {
    "a name of theirs": ["host: evil.example"],
    "a name of theirs and a port": ["host: evil.example:8000"],
    "two names": ["host: localhost", "host: evil.example"],
    "another site": ["host: localhost", "sec-fetch-site: cross-site"],
    "another port of ours": ["host: localhost", "sec-fetch-site: same-site"],
    "an origin": ["host: localhost", "origin: http://evil.example"],
    "an origin on another port": ["host: localhost:8000", "origin: http://localhost:3000"],
    "no origin": ["host: localhost", "origin: null"],
    "a name in a port": ["host: localhost:80@evil.example"],
}
OURS = {
    "curl": ["host: 127.0.0.1:8000"],
    "old curl": [],
    "six": ["host: [::1]:8000"],
    "an address": ["host: 192.0.2.7"],
    "a name that was given": ["host: LLM.example."],
    "a page of ours": [
        "host: localhost:8000",
        "sec-fetch-site: same-origin",
        "origin: http://localhost:8000",
    ],
    "a page of ours on a plain port": ["host: localhost", "origin: http://localhost:80"],
    "a page behind a proxy": ["host: 127.0.0.1:8000", "origin: https://llm.example"],
    "an address bar": ["host: localhost", "sec-fetch-site: none"],
}
NAMED = Limits(running_max=2, waiting_max=1, length_max=4096, names=("llm.example",))


def answered(port: int, method: str, path: str, headers: list[str]) -> tuple[int, dict]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as made:
        made.putrequest(method, path, skip_host=True)
        for header in headers:
            made.putheader(*header.split(": ", 1))
        made.endheaders()
        answer = made.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")


@pytest.mark.parametrize("sent", FOREIGN.values(), ids=FOREIGN)
def test_pages_of_others_get_nothing_without_a_key(sent: list[str]):
    with Served(PacedEngine(counting(2)), limits=NAMED) as served:
        for method, path in (("POST", "/flush_cache"), ("POST", "/abort_request"), ("GET", "/x")):
            code, told = answered(served.port, method, path, [*sent, "content-type: text/plain"])
            assert (code, told["error"]["type"]) == (403, "permission_error")
        assert served.engine.flushes == 0
        assert answered(served.port, "GET", "/health", sent)[0] == 200
    with Served(PacedEngine(counting(2)), keys=("right",)) as served:
        key = [*sent, "authorization: Bearer right"]
        assert answered(served.port, "POST", "/flush_cache", key)[0] == 200


@pytest.mark.parametrize("sent", OURS.values(), ids=OURS)
def test_everybody_else_is_answered(sent: list[str]):
    with Served(PacedEngine(counting(2)), limits=NAMED) as served:
        assert answered(served.port, "POST", "/flush_cache", sent)[0] == 200
        assert answered(served.port, "GET", "/flush_cache", sent)[0] == 405


def test_any_name_is_ours_if_the_operator_says_so():
    limits = Limits(running_max=2, waiting_max=1, length_max=4096, names=("*",))
    with Served(PacedEngine(counting(2)), limits=limits) as served:
        assert answered(served.port, "GET", "/version", ["host: any.example"])[0] == 200
        page = ["host: any.example", "origin: http://evil.example"]
        assert answered(served.port, "GET", "/version", page)[0] == 403


# ---- HTTP/1.0, and codings


@pytest.mark.parametrize("count", [1, 40])
def test_a_client_of_http_1_0_gets_no_chunks(count: int):
    """Its answer ends with the connection; between, it is what a client of 1.1 gets."""
    with Served(PacedEngine(counting(count)), limits=LIMITS) as served:
        body = completion(stream=True, max_tokens=count)
        told = []
        for version in (b"HTTP/1.0", b"HTTP/1.1"):
            with raw(served.port) as made:
                made.sendall(post(body, "connection: close").replace(b"HTTP/1.1", version, 1))
                told.append(rest(made).partition(b"\r\n\r\n"))
        (old_head, _, old), (new_head, _, new) = told
        assert b"transfer-encoding" not in old_head
        assert b"connection: close" in old_head
        assert b"transfer-encoding: chunked" in new_head
        assert old.startswith(b"data: {")
        assert old.endswith(b"data: [DONE]\n\n")
        assert b"\r\n" not in old
        assert old.count(b'"text":"a') == new.count(b'"text":"a') > 0


def test_a_short_answer_to_http_1_0_has_its_length():
    with Served(PacedEngine(saying("a b")), limits=LIMITS) as served, raw(served.port) as made:
        made.sendall(post(completion()).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        lines, _, body = rest(made).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in lines
        assert json.loads(body)["choices"][0]["text"]


@pytest.mark.parametrize("coding", ["gzip, chunked", "identity, chunked"])
def test_a_body_in_another_coding_is_refused(coding: str):
    with Served(PacedEngine(saying("a b")), limits=LIMITS) as served, raw(served.port) as made:
        lines = head("/v1/completions", f"transfer-encoding: {coding}", method="POST")
        made.sendall(lines + chunk(4) + b"0\r\n\r\n")
        code, error = parsed(rest(made))
        assert (code, "only chunked is read" in error["message"]) == (501, True)
