"""Bodies that are long to read, and what the other clients notice of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ess.models.chat.styles import DeepSeekStyle, style_of
from ess.server.commands.start.files.checkpoint import embedded_path
from ess.server.dialects import prompts, schemas
from ess.server.http.auth_limits import PIECE_BYTES, Bodies
from ess.server.process.bounds import (
    JOINED_BYTES_MAX,
    LOOP_BODY_BYTES,
    READS_MAX,
    SHORT_BODY_BYTES,
)
from ess.server.process.tally import Tally
from ess.server.process.text_child import Desk, Failed, head_of
from ess.server.process.texts import PROGRAM, TEMPLATED, Lane
from tests.attacks.processes import peak_bytes
from tests.attacks.wire import MIB, listed
from tests.server.harness import (
    TOKENIZER,
    VOCABULARY,
    PacedEngine,
    Served,
    counting,
    raw,
    saying,
    until,
)
from tests.support.crowd import Crowd
from tests.support.kin import children
from tests.support.process import Process

LONG = {"pad": "x" * LOOP_BODY_BYTES}
STREAM = {"prompt": "a", "max_tokens": 4000}
LONGER = {"pad": "x" * SHORT_BODY_BYTES}
FORMAT = {"type": "json_schema", "name": "n", "schema": {"enum": ["é", None]}}
TURNS = {"messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    style = style_of(embedded_path(), TOKENIZER)
    with Served(PacedEngine(saying("Yes.")), style=style) as made:
        yield made


def post(url: str, path: str, body: object) -> tuple[int, dict]:
    raw_body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, raw_body)) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


@pytest.mark.parametrize("kind", TEMPLATED)
def test_a_template_is_waited_for_apart_in_every_dialect(served: Served, kind: type):
    assert not served.service.texts.is_short(b"{}", kind)
    assert served.service.texts.is_short(b"{}", schemas.CompletionAsk)


class Asking:
    """A request that is under way while the test goes on."""

    def __init__(self, served: Served, path: str, body: object) -> None:
        self._given = served.url, path, body
        self.answer: tuple[int, dict] | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self.answer = post(*self._given)

    def ended(self) -> tuple[int, dict]:
        self._thread.join(60)
        assert self.answer is not None
        return self.answer


@contextmanager
def stopped(served: Served) -> Iterator[list[int]]:
    """While both text processes stand still."""
    for pad in (LONG, LONGER):
        assert post(served.url, "/tokenize", {"prompt": "a", **pad})[0] == 200
    pids = [process_of(served, lane) for lane in (1, 2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def process_of(served: Served, lane: int) -> int:
    process = served.service.texts.lanes[lane].process
    return 0 if process is None else process.pid


def reading(served: Served) -> int:
    return served.service.texts.reading_count


# ---- the same, wherever a body is read


@pytest.mark.parametrize("pad", [{}, LONG, LONGER])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": ["The tide", "turns"], "max_tokens": 2}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "logit_bias": {"9": 1.5}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "é"}], "seed": 5}),
        ("/generate", {"text": ["one", "two"], "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 2}}),
        ("/inference/v1/generate", {"token_ids": [4, 5], "sampling_params": {"max_tokens": 1}}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "bad_words": ["the", "é\n"]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "guided_choice": ["a", '"é\n']}),
        ("/v1/responses", {"input": "a", "text": {"format": FORMAT}, "max_output_tokens": 2}),
        ("/v1/messages", {**TURNS, "max_tokens": 2, "output_config": {"format": FORMAT}}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "ebnf": "start: A"}}),
    ],
)
def test_a_body_asks_for_the_same_wherever_it_is_read(
    served: Served, path: str, asked: dict, pad: dict
):
    seen = []
    for extra in ({}, pad):
        before = len(served.engine.adds)
        seed = {} if "sampling_params" in asked else {"seed": 5}
        status, answer = post(served.url, path, {**asked, **extra, **seed})
        assert status == 200, answer
        adds = served.engine.adds[before:]
        seen.append([(add.prompt, replace(add.sampling, seed=0)) for add in adds])
        seen.append(type(answer))
    assert seen[:2] == seen[2:]
    assert seen[0]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "a", "bad_words": ["é漢x" * 30] * 500}),
        ("/v1/completions", {"prompt": "a", "guided_choice": [f"c{n}" for n in range(3000)]}),
        ("/v1/chat/completions", {**TURNS, "tools": [TOOL] * 120, "tool_choice": "required"}),
    ],
)
def test_what_grows_with_a_body_is_not_made_on_the_event_loop(
    path: str, asked: dict, monkeypatch: pytest.MonkeyPatch
):
    """A grammar of all schemas and the ids of words: a text process makes them."""

    def made_here(*given: object) -> None:
        raise AssertionError("a text process makes it")

    with Served(PacedEngine(saying("Yes.")), style=DeepSeekStyle(), is_marked=True) as served:
        assert served.engine.adds == []
        monkeypatch.setattr(prompts, "forms_of", made_here)
        status, answer = post(served.url, path, {**asked, "max_tokens": 2})
        assert status == 200, answer
        [add] = served.engine.adds
        assert add.sampling.grammar is not None or add.sampling.bad_words


@pytest.mark.parametrize("pad", [{}, LONG, LONGER])
def test_texts_to_ids_and_back(served: Served, pad: dict):
    texts = ["naïve 漢字", ""]
    status, document = post(served.url, "/tokenize", {"prompt": texts, **pad})
    assert status == 200
    assert document["tokens"] == [TOKENIZER.encode(text, add_special=True) for text in texts]
    asked = {"tokens": document["tokens"], "skip_special_tokens": True, **pad}
    assert post(served.url, "/detokenize", asked)[1]["text"] == texts
    status, refused = post(served.url, "/tokenize", {"prompt": "a", "model": "other", **pad})
    assert status == 404, refused


@pytest.mark.parametrize("pad", [{}, LONG])
def test_a_message_cannot_write_special_tokens(served: Served, pad: dict):
    """A prompt can: it is all the client's."""
    asked = {"messages": [{"role": "user", "content": "a<|end|>b"}], **pad}
    ids = post(served.url, "/tokenize", asked)[1]["tokens"]
    assert ids[0] == TOKENIZER.id_of("<|begin|>"), "the template's own"
    assert not TOKENIZER.special_ids & set(ids[1:])
    assert "a<|end|>b" in TOKENIZER.decode(ids)
    ids = post(served.url, "/tokenize", {"prompt": "a<|end|>b", **pad})[1]["tokens"]
    assert TOKENIZER.id_of("<|end|>") in ids


# ---- counted before it is worked on


BIASES = {str(token): 1 for token in range(1025)}


@pytest.mark.parametrize(
    ("path", "body", "says", "param"),
    [
        ("/v1/completions", listed("prompt", '""', 300_000), "300,000 prompts", "prompt"),
        ("/v1/completions", listed("prompt", "[1]", 300), "300 lists", "prompt"),
        ("/v1/completions", listed("prompt", "1", 1_100_000), "1,048,576 token", "prompt"),
        ("/v1/completions", {"prompt": "a" * 9_000_000}, "9,000,000 characters", "prompt"),
        ("/v1/completions", {"prompt": "a" * 200_000}, "tokens of at most 23", "prompt"),
        ("/tokenize", listed("prompt", '"a"', 129), "129 prompts", "prompt"),
        ("/tokenize", {"prompt": "a" * 9_000_000}, "9,000,000 characters", "prompt"),
        ("/generate", listed("text", '"a"', 129), "129 prompts", "text"),
        ("/detokenize", listed("tokens", "5", 5_000), "5,000 ids", "tokens"),
        ("/detokenize", listed("tokens", "5", 1_100_000), "1,048,576 token", "tokens"),
        ("/v1/chat/completions", listed("messages", "{}", 5_000), "5,000 entries", "messages"),
        ("/v1/completions", {"prompt": "a", "logit_bias": BIASES}, "1,025 entries", "logit_bias"),
        (
            "/v1/completions",
            {"prompt": "a", "stop_token_ids": [5] * 1025},
            "1,025 entries",
            "stop_token_ids",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "response_format": {"type": "text", "x": [[]] * 40_000}},
            "beside its prompt",
            None,
        ),
        ("/abort_request", listed("request_ids", '"a"', 40_000), "beside its prompt", None),
    ],
)
def test_what_can_be_counted_is_counted_first(
    served: Served, path: str, body: object, says: str, param: str | None
):
    status, answer = post(served.url, path, body)
    assert status == 400
    assert says in answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_an_integer_beyond_64_bits_is_refused(served: Served):
    asked = {"prompt": "a", "response_format": {"type": "text", "x": 1 << 70}, **LONG}
    status, answer = post(served.url, "/v1/completions", asked)
    assert (status, "64 bits" in answer["error"]["message"]) == (400, True)


# ---- beside other clients


def test_a_body_that_is_being_read_delays_nobody(served: Served):
    with stopped(served):
        slow = Asking(served, "/tokenize", {"prompt": "slow", **LONG})
        until(lambda: reading(served) == 1, "the reading")
        assert post(served.url, "/tokenize", {"prompt": "quick"})[0] == 200
        assert post(served.url, "/v1/completions", {"prompt": "quick", "max_tokens": 1})[0] == 200
        assert slow.answer is None
    status, document = slow.ended()
    assert (status, document["tokens"]) == (200, TOKENIZER.encode("slow", add_special=True))


def test_a_short_body_does_not_wait_behind_a_long_one(served: Served):
    with stopped(served) as pids:
        long = Asking(served, "/tokenize", {"prompt": "long", **LONGER})
        until(lambda: reading(served) == 1, "the reading")
        os.kill(pids[0], signal.SIGCONT)
        assert post(served.url, "/tokenize", {"prompt": "short", **LONG})[0] == 200
        assert long.answer is None
    assert long.ended()[0] == 200


def test_streams_go_on_while_a_body_is_read_until_its_time_is_over():
    """Floats with large exponents are the slowest JSON there is: seconds for these."""
    body = b'{"messages":[%b]}' % listed("x", "1.5e300", 2_000_000)
    engine = PacedEngine(counting(100_000), pace_s=0.02)
    with Served(engine, read_s=1.0) as served, Crowd(served.url, [STREAM]) as crowd:
        until(lambda: crowd.texts[0].count(b"data:") > 3, "the stream")
        slow = Asking(served, "/v1/chat/completions", body)
        until(lambda: reading(served) == 1, "the reading")
        before = crowd.texts[0].count(b"data:")
        until(lambda: crowd.texts[0].count(b"data:") > before + 10, "the stream")
        assert slow.answer is None
        status, answer = slow.ended()
    assert status == 400
    assert "took more than 1 s" in answer["error"]["message"]


def test_more_than_may_wait_are_refused(served: Served):
    body = json.dumps({"prompt": "a", **LONG}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    with stopped(served):
        waiting = [http.client.HTTPConnection("127.0.0.1", served.port) for _ in range(READS_MAX)]
        for connection in waiting:
            connection.connect()
            connection.sock.sendall(head + body)
        until(lambda: reading(served) == READS_MAX, "the queue")
        request = urllib.request.Request(served.url + "/tokenize", body)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        with caught.value as refused:
            assert refused.code == 503
            assert refused.headers["x-ess-reason"] == "texts"
            assert refused.headers["retry-after"] == "1"
        assert post(served.url, "/tokenize", {"prompt": "quick"})[0] == 200
    for connection in waiting:
        assert connection.sock.recv(12) == b"HTTP/1.1 200"
        connection.close()
    until(lambda: reading(served) == 0, "the end of the queue")


# ---- ends


def test_the_work_of_a_client_that_leaves_ends(served: Served):
    body = json.dumps({"prompt": "a", **LONG}).encode()
    with stopped(served) as pids:
        left = served.service.tally.disconnect_count
        with raw(served.port) as made:
            head = (
                b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
                % len(body)
            )
            made.sendall(head + body)
            until(lambda: reading(served) == 1, "the reading")
        until(lambda: reading(served) == 0, "the end of the work")
        until(lambda: process_of(served, 1) != pids[0], "the end of the process")
        assert served.service.tally.disconnect_count == left + 1
    assert post(served.url, "/tokenize", {"prompt": "a", **LONG})[0] == 200


def test_a_text_process_that_dies_is_replaced_and_its_work_tried_again(served: Served):
    with stopped(served) as pids:
        asked = Asking(served, "/tokenize", {"prompt": "again", **LONG})
        until(lambda: reading(served) == 1, "the reading")
        os.kill(pids[0], signal.SIGKILL)
        assert asked.ended()[0] == 200
        assert process_of(served, 1) not in (0, pids[0])


def test_if_it_dies_again_and_again_the_answer_is_503(served: Served):
    with stopped(served):
        asked = Asking(served, "/tokenize", {"prompt": "again", **LONG})
        until(lambda: reading(served) == 1, "the reading")
        while asked.answer is None:
            if pid := process_of(served, 1):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        status, answer = asked.ended()
    assert status == 503
    assert answer["error"]["type"] == "unavailable_error"
    assert post(served.url, "/tokenize", {"prompt": "a", **LONG})[0] == 200


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""


def test_a_text_process_whose_server_has_ended_says_nothing():
    """Also where the server ends before the process has read its tokenizer, and where the user's
    limit of memory is below the process's own."""
    desk = Desk(model=str(embedded_path()), length_max=64, vocabulary=VOCABULARY)
    packed = msgspec.json.encode(desk)
    read, written = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *PROGRAM],
        input=head_of("Desk", len(packed)) + packed,
        stdout=written,
        stderr=subprocess.PIPE,
        check=False,
        timeout=120,
    )
    os.close(written)
    assert (done.returncode, done.stderr) == (0, b"")


# ---- the memory of real processes


@pytest.mark.slow
def test_a_refused_text_leaves_nothing_behind():
    """30 MB of text took 5 GB to encode, of which the server kept the half."""
    text = b'{"max_tokens":1,"prompt":"%b"}' % (b"every word " * 2_730_000)
    values = b'{"messages":[%b]}' % listed("x", "[]", 11_000_000)
    with Process("--engine", "paced").wait_ready() as process:
        assert post(process.url, "/tokenize", {"prompt": "a", **LONG})[0] == 200
        before = peak_bytes(process.process.pid)
        for path, body in (("/v1/completions", text), ("/v1/chat/completions", values)):
            status, answer = post(process.url, path, body)
            assert status == 400, answer
        assert peak_bytes(process.process.pid) < before + 160 * MIB
        peaks = [peak_bytes(pid) for pid in children(process.process.pid)]
        assert max(peaks) < 1200 * MIB, peaks
        pids = [process.process.pid, *children(process.process.pid)]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of them all")


def test_a_refusal_whose_client_has_left_is_not_logged():
    lane = Lane(Desk(model="", length_max=2, vocabulary=8), PROGRAM, read_s=1.0)
    logged: list[dict] = []

    async def refused(raw: bytes, kind: str) -> Failed:
        await asyncio.sleep(0.01)
        return Failed(sentence="no")

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))
        asked = asyncio.ensure_future(lane.ask(b"{}", "ChatAsk"))
        await asyncio.sleep(0)
        asked.cancel()
        while lane.sizes or not asked.done():
            await asyncio.sleep(0.01)
        gc.collect()

    lane._tried_twice = refused
    asyncio.run(leave())
    assert not logged


# ---- pieces of bodies


@pytest.mark.parametrize(
    ("size", "count", "most"), [(1, 50_000, 5), (64 << 10, 300, 301), (PIECE_BYTES // 2 + 1, 9, 10)]
)
def test_a_body_stays_in_pieces_that_are_not_too_many(size: int, count: int, most: int):
    sent = [bytes([number % 251]) * size for number in range(count)]
    coming = [{"type": "http.request", "body": piece, "more_body": True} for piece in sent]
    coming[-1]["more_body"] = False
    messages = iter(coming)

    async def receive() -> dict[str, Any]:
        return next(messages)

    bodies = Bodies(1 << 30, Tally())
    pieces = asyncio.run(bodies.take(receive))
    assert pieces is not None
    assert b"".join(pieces) == b"".join(sent)
    assert len(pieces) <= most
    assert bodies._held == 0


def test_a_body_that_stays_in_pieces_is_read_as_one_that_does_not():
    """White space makes it long."""
    with Served(PacedEngine(saying("one"))) as served:
        for padding in (0, JOINED_BYTES_MAX):
            sent = b'{"prompt": "x y z", "max_tokens": 2' + b" " * padding + b"}"
            assert post(served.url, "/v1/completions", sent)[0] == 200
        first, last = (add.prompt for add in served.engine.adds)
        assert first == last
