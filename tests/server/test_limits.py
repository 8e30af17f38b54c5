"""What the server refuses, cuts off and survives: keys, sizes, load, readers who leave."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from ess.engine.process.messages import Status
from ess.server.http.app import DOORS
from ess.server.http.auth_limits import OPEN_PATHS, SEALED_PATHS
from ess.server.process.service import Limits
from tests.server.harness import PacedEngine, Served, counting, raw, saying, until

LIMITS = Limits(running_max=2, waiting_max=1, length_max=4096, keep_alive_s=0.1, stall_s=0.5)


def ask(served: Served, path: str, body: object = None, **headers: str):
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(served.url + path, sent, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, answer.read()


def refused(served: Served, path: str, body: object = None, **headers: str):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(served, path, body, **headers)
    return caught.value.code, caught.value.headers, json.loads(caught.value.read())["error"]


def completion(**changed: object) -> dict:
    return {"model": "test-model", "prompt": "x", "max_tokens": 3000, **changed}


def opened(served: Served, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A request that has been sent; nothing of its answer has been read."""
    made = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    sent = json.dumps(body).encode()
    made.sendall(b"POST %b HTTP/1.1\r\nhost: localhost\r\n" % path.encode())
    made.sendall(b"content-length: %d\r\n\r\n%b" % (len(sent), sent))
    return made


# ---- keys


def test_every_path_but_the_probes_needs_the_key():
    with Served(PacedEngine(counting(2)), keys=("right", "spare")) as served:
        doors = [(door.methods, path) for door in DOORS for path in door.paths]
        for methods, path in [door for door in doors if door[1] not in SEALED_PATHS]:
            body = {} if methods == "POST" else None
            if path in OPEN_PATHS:
                ask(served, path)
            else:
                code, headers, error = refused(served, path, body)
                assert (code, error["type"]) == (401, "authentication_error"), path
                assert headers["www-authenticate"] == "Bearer"
        assert refused(served, "/nothing")[0] == 401
        for key in ("", "wrong", "right ", "righ", "rightt"):
            expected = 401 if key.strip() != "right" else None
            if expected:
                assert refused(served, "/v1/models", Authorization=f"Bearer {key}")[0] == 401
        ask(served, "/v1/models", Authorization="Bearer right")
        ask(served, "/v1/models", Authorization="bearer spare")
        ask(served, "/v1/models", **{"X-Api-Key": "right"})
        assert refused(served, "/v1/models", Authorization="Basic right")[0] == 401
        assert served.engine.adds == []


def test_a_request_id_goes_out_as_it_came_in():
    with Served(PacedEngine(counting(2))) as served:
        headers, body = ask(served, "/v1/completions", completion(), **{"X-Request-Id": "mine-1"})
        assert headers["x-request-id"] == "mine-1"
        assert json.loads(body)["id"] == "cmpl-mine-1"
        for name in ("rid", "request_id"):
            _, body = ask(served, "/v1/completions", completion(**{name: "mine-3"}))
            assert json.loads(body)["id"] == "cmpl-mine-3"
        for bad in ("", "a b", "ä", "x" * 257):
            headers, _ = ask(served, "/health", **{"X-Request-Id": bad.encode().decode("latin-1")})
            assert len(headers["x-request-id"]) == 32
        _, headers, _ = refused(served, "/nothing", **{"X-Request-Id": "mine-2"})
        assert headers["x-request-id"] == "mine-2"


# ---- sizes


@pytest.mark.parametrize(
    ("path", "body", "code", "says"),
    [
        ("/chat/completions", {}, 404, "did you mean /v1/chat/completions?"),
        ("/v1/complitions", {}, 404, "did you mean /v1/completions?"),
        ("/zzzzzz", None, 404, "there is no /zzzzzz; /openapi.json lists what there is"),
        ("/v1/completions", None, 405, "GET is not served at /v1/completions; POST is"),
        ("/v1/models", {}, 405, "POST is not served at /v1/models; GET is"),
        ("/v1/models/a/b", {}, 405, "POST is not served at /v1/models/a/b; GET is"),
        ("/v1/responses/input_tokens", None, 405, "at /v1/responses/input_tokens; POST is"),
        ("/v1/responses/resp_1", {}, 405, "at /v1/responses/resp_1; DELETE and GET are"),
        ("/health/", None, 404, "there is no /health/; did you mean /health?"),
        ("/v1/models/", None, 404, "there is no /v1/models/; did you mean /v1/models?"),
        ("/v1/health", None, 404, "did you mean /health?"),
        ("/V1/Models", None, 404, "did you mean /v1/models?"),
        ("/v1/embeddings", {}, 404, "there is no /v1/embeddings; this server makes text: no"),
        ("/v1/audio/speech", {}, 404, "there is no /v1/audio/speech; this server makes text from"),
        ("/v1/embeddingsx", {}, 404, "there is no /v1/embeddingsx; /openapi.json lists"),
        ("/api/chat", {}, 404, "there is no /api/chat; Ollama's routes are not served: take a"),
        ("/v1/responses/compact", {}, 404, "every request has its whole prompt"),
        ("/is_sleeping", None, 404, "there is no /is_sleeping; memory is not given back: /pause"),
        ("/tokenizer_info", None, 404, "/tokenize and /detokenize use it"),
        ("/props", None, 404, "llama.cpp's routes are not served: ask /v1/completions"),
        ("/", None, 404, "there is no /; /chat talks to the model, /dashboard shows the server"),
    ],
)
def test_a_wrong_path_is_told_the_right_one(path: str, body: dict | None, code: int, says: str):
    with Served(PacedEngine(counting(2))) as served:
        status, _, error = refused(served, path, body)
        assert (status, says in error["message"]) == (code, True), error


def test_a_long_body_is_refused_with_and_without_its_length():
    limits = Limits(running_max=2, waiting_max=2, length_max=4096, body_max=2000)
    with Served(PacedEngine(counting(2)), limits=limits) as served:
        code, _, error = refused(served, "/v1/completions", completion(prompt="x" * 3000))
        assert code == 413
        assert "2,000 bytes" in error["message"]
        with raw(served.port) as made:
            made.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
            made.sendall(b"transfer-encoding: chunked\r\n\r\n")
            for _ in range(4):
                made.sendall(b"300\r\n" + b" " * 0x300 + b"\r\n")
            assert made.recv(4096).startswith(b"HTTP/1.1 413")
        assert json.loads(ask(served, "/v1/completions", completion())[1])["choices"]


@pytest.mark.parametrize(("coding", "code"), [("gzip", 400), ("br, gzip", 400), ("Identity", 200)])
def test_a_packed_body_is_refused_in_words(coding: str, code: int):
    """Read as it is, it would be no JSON, and the sentence would not say why."""
    plain = b'{"prompt": "a", "max_tokens": 1}'
    with Served(PacedEngine(counting(2))) as served:
        asking = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        body = plain if code == 200 else gzip.compress(plain)
        asking.request("POST", "/v1/completions", body, {"content-encoding": coding})
        answer = asking.getresponse()
        said = answer.read()
        assert answer.status == code
        assert (b"has a content-encoding" in said) == (code == 400)
        asking.close()


def test_a_long_head_is_refused():
    with Served(PacedEngine(counting(2)), head_bytes_max=4096) as served:
        with raw(served.port) as made:
            made.sendall(
                b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"y" * 5000 + b"\r\n\r\n"
            )
            assert made.recv(4096).startswith(b"HTTP/1.1 431")
        with raw(served.port) as made:
            made.sendall(b"GET /health HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    made.sendall(b"x-more: " + b"y" * 100 + b"\r\n")
            assert made.recv(4096).startswith(b"HTTP/1.1 431")
        ask(served, "/health", **{"X-Long": "y" * 3000})


def test_connections_beyond_the_most_are_told_so():
    with Served(PacedEngine(counting(2)), connections_max=3) as served:
        held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        with raw(served.port) as made:
            made.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            told = made.recv(4096)
            assert told.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in told
            assert b"x-request-id: " in told
        for connection in held:
            connection.close()
        until(lambda: served.service.tally.connection_count == 0, "closing")
        told = ask(served, "/metrics")[1]
        assert b'\ness_refusals_total{reason="connections"} 1.0\n' in told
        assert b"\ness_connections 1.0\n" in told
        assert b"\nprocess_resident_memory_bytes " in told


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
        b"transfer-encoding: chunked\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered_and_forgotten(sent: bytes):
    with Served(PacedEngine(counting(2))) as served:
        with raw(served.port) as made:
            made.sendall(sent)
            made.shutdown(socket.SHUT_WR)
            told = b"".join(iter(lambda: made.recv(4096), b""))
            assert told[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404", b"HTTP/1.1 413")
            head, _, body = told.partition(b"\r\n\r\n")
            assert b"x-request-id: " in head
            assert json.loads(body)["error"]["message"]
        ask(served, "/health")


# ---- load


def test_overload_is_an_answer_that_names_the_limiter():
    engine = PacedEngine(counting(10**6), pace_s=0.01, status=Status(limiter="host pages"))
    with Served(engine, limits=LIMITS) as served:
        until(lambda: served.service.board.status.limiter is not None, "a status")
        held = [opened(served, completion(stream=True)) for _ in range(3)]
        until(lambda: served.service.link.open_count == 3, "three requests")
        code, headers, error = refused(served, "/v1/completions", completion())
        assert code == 503
        assert error["type"] == "overloaded"
        assert error["code"] == headers["x-ess-reason"] == "host_pool_full"
        assert "limit of 3" in error["message"]
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) >= 1000
        for connection in held:
            connection.close()
        until(lambda: served.service.link.open_count == 0, "the end of three")
        client = served.client()
        made = client.completions.create(model="test-model", prompt="x", max_tokens=3)
        assert made.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_who_leaves_is_cancelled_also_while_waiting_for_the_first_token(stream: bool, held: bool):
    engine = PacedEngine(counting(10**6), pace_s=0.005)
    with Served(engine, limits=LIMITS) as served:
        if held:
            engine.hold()
        made = opened(served, completion(stream=stream))
        until(lambda: len(engine.adds) == 1, "the request")
        if held:
            until(lambda: served.service.link.calls.oldest_wait_s > 0.0, "a wait")
        elif stream:
            assert b"data: " in made.recv(4096) + made.recv(4096)
            assert served.service.link.calls.oldest_wait_s == 0.0
        made.close()
        until(lambda: engine.aborted == [engine.adds[0].number], "the abort")
        assert served.service.link.open_count == 0
        until(lambda: served.service.tally.disconnect_count == 1, "the count")


def test_silence_is_broken_by_comments():
    engine = PacedEngine(saying("late"))
    with Served(engine, limits=LIMITS) as served:
        engine.hold()
        with opened(served, completion(stream=True)) as made:
            told = b""
            while told.count(b": keep-alive\n\n") < 2:
                told += made.recv(4096)
            engine.held.set()
            while b"[DONE]" not in told:
                told += made.recv(4096)
    assert told.count(b": keep-alive\n\n") >= 2
    assert told.index(b": keep-alive") < told.index(b"data: ")


@contextlib.contextmanager
def beside_a_stalled_reader(*, stall_s: float) -> Iterator[Served]:
    """A server with a client that asks for a million tokens and reads none."""
    engine = PacedEngine(counting(10**6), per_step=64)
    limits = Limits(
        running_max=8, waiting_max=8, length_max=1 << 20, keep_alive_s=0.1, stall_s=stall_s
    )
    with Served(engine, limits=limits) as served:
        body = completion(stream=True, max_tokens=10**6, logprobs=20)
        with contextlib.closing(opened(served, body)):
            until(lambda: len(engine.adds) == 1, "the request")
            yield served


def test_other_clients_are_answered_beside_a_reader_that_stalls():
    with beside_a_stalled_reader(stall_s=600.0) as served:
        made = served.client().completions.create(model="test-model", prompt="x", max_tokens=2000)
        assert made.usage.completion_tokens == 2000
        assert served.engine.aborted == []


def test_a_reader_that_stalls_is_given_up():
    with beside_a_stalled_reader(stall_s=0.5) as served:
        until(lambda: served.engine.adds[0].number in served.engine.aborted, "giving up")


def test_a_reader_that_pauses_misses_nothing():
    """Straight to the socket, then held back behind a full one, then straight again."""
    engine = PacedEngine(lambda add: range(10, 4010), per_step=4, pace_s=0.0005)
    with Served(engine, limits=Limits(running_max=2, waiting_max=0, length_max=4096)) as served:
        wishes = {"max_tokens": 4000, "logprobs": 20, "ignore_eos": True}
        body = {"token_ids": [5], "sampling_params": wishes, "stream": True}
        with opened(served, body, "/inference/v1/generate") as made:
            until(lambda: served.is_held_back, "a full socket")
            told = bytearray()
            while b"[DONE]" not in told[-100:]:
                told += made.recv(1 << 18)
        lines = [line[6:] for line in told.splitlines() if line.startswith(b"data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert [i for choice in choices for i in choice["token_ids"]] == [*range(10, 4010)]


def test_aborting_by_id_ends_the_stream_with_abort():
    engine = PacedEngine(counting(10**6), pace_s=0.005)
    with Served(engine, limits=LIMITS) as served:
        client = served.client()
        for field in ({"rid": "mine"}, {"request_ids": ["mine", "other"]}, {"abort_all": True}):
            chunks = iter(
                client.completions.create(
                    model="test-model",
                    prompt="x",
                    max_tokens=3000,
                    stream=True,
                    extra_headers={"x-request-id": "mine"},
                )
            )
            next(chunks)
            path = "/abort_requests" if "request_ids" in field else "/abort_request"
            assert json.loads(ask(served, path, field)[1]) == {"aborted": 1}
            last = list(chunks)[-1]
            assert last.choices[0].finish_reason == "abort"
        assert json.loads(ask(served, "/abort_request", {"rid": "nobody"})[1]) == {"aborted": 0}
        until(lambda: engine.aborted == [add.number for add in engine.adds], "three aborts")


# ---- failures


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_engine_ends_everything_with_an_error(stream: bool):
    engine = PacedEngine(counting(10**6), pace_s=0.005)
    with Served(engine, limits=LIMITS) as served:
        with opened(served, completion(stream=stream)) as made:
            until(lambda: served.service.link.open_count == 1, "the request")
            told = made.recv(4096) if stream else b""
            served.call(lambda: served.service.link.lose("the test pulled the plug"))
            while b"[DONE]" not in told and b"unavailable_error" not in told:
                piece = made.recv(65536)
                assert piece, told
                told += piece
        assert b"pulled the plug" in told
        if not stream:
            assert told.startswith(b"HTTP/1.1 503")
        code, _, error = refused(served, "/health")
        assert (code, error["type"]) == (503, "unavailable_error")
        assert refused(served, "/ready")[0] == 503
        assert refused(served, "/v1/completions", completion())[0] == 503


def test_before_the_model_is_loaded_the_server_is_alive_but_not_ready():
    with Served(PacedEngine(counting(2), says_ready=False)) as served:
        assert json.loads(ask(served, "/health")[1]) == {"status": "starting"}
        code, headers, error = refused(served, "/ready")
        assert (code, error["code"], headers["retry-after"]) == (503, "starting", "2")
        assert refused(served, "/v1/completions", completion())[2]["code"] == "starting"


def test_an_error_of_ours_says_nothing_of_us(caplog: pytest.LogCaptureFixture):
    with Served(PacedEngine(counting(2))) as served:
        served.service.tokenizer = None
        code, _, error = refused(served, "/v1/completions", completion())
        assert code == 500
        assert error["message"] == "the server failed; its log says how"
        assert refused(served, "/v1/completions", completion())[1]["x-request-id"]
    assert "NoneType" in caplog.text


def test_many_at_once_all_get_their_own():
    engine = PacedEngine(lambda add: [*add.prompt[-1:], *add.prompt[-2:-1], 1], pace_s=0.001)
    limits = Limits(running_max=64, waiting_max=64, length_max=4096)
    with Served(engine, limits=limits) as served:

        def one(index: int) -> list[int]:
            body = {"token_ids": [index + 10, index + 20], "sampling_params": {"max_tokens": 9}}
            made = json.loads(ask(served, "/inference/v1/generate", body)[1])
            return made["choices"][0]["token_ids"]

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            usages = list(pool.map(one, range(100)))
    assert usages == [[index + 20, index + 10, 1] for index in range(100)]
