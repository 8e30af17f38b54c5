"""The identity of requests: ids, sessions, traces and priorities, from a request to its answer and
the engine."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from ess.server.http import request_ids
from tests.server.harness import PacedEngine, Served, counting, until
from tests.server.test_limits import ask, completion, refused

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
EVENT = re.compile(rb"(?:^|\n\n)data: (?:\[DONE\]\n\n)?")
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/generate": {"text": "a"},
    "/inference/v1/generate": {"token_ids": [5]},
}


@pytest.mark.parametrize("path", BODIES)
def test_priority_and_session_come_from_the_body_of_every_dialect(path: str):
    with Served(PacedEngine(counting(2))) as served:
        headers, _ = ask(served, path, {**BODIES[path], "priority": -3, "session_id": "s-1"})
        assert headers["x-session-id"] == "s-1"
        ask(served, path, BODIES[path])
        assert [add.priority for add in served.engine.adds] == [-3, 0]
        for wrong, says in (
            ({"priority": 1 << 31}, "priority is 2147483648, must be"),
            ({"priority": "high"}, "priority"),
            ({"session_id": "a\r\nb: c"}, "session_id must be"),
            ({"session_id": "\ud800"}, "body"),
        ):
            code, headers, error = refused(served, path, {**BODIES[path], **wrong})
            assert code == 400
            assert says in error["message"]
            assert "x-session-id" not in headers
        assert len(served.engine.adds) == 2


@pytest.mark.parametrize("path", BODIES)
def test_a_request_is_named_by_its_body(path: str):
    """The answer's header says the same name as the answer; other names are refused."""
    field = "request_id" if path.startswith("/inference") else "rid"
    with Served(PacedEngine(counting(2))) as served:
        given = {**BODIES[path], field: "mine"}
        headers, body = ask(served, path, given, **{"X-Request-Id": "theirs"})
        assert headers["x-request-id"] == "mine"
        assert b"mine" in body
        assert b"theirs" not in body
        for wrong in ("x" * 257, "a b", "a\r\nb: c", "ä"):
            code, headers, error = refused(served, path, {**BODIES[path], field: wrong})
            assert (code, error["param"]) == (400, field)
            assert error["message"] == f"{field} must be 1 to 256 visible ASCII characters"
            assert len(headers["x-request-id"]) == 32
        assert len(served.engine.adds) == 1


def test_every_name_of_a_list_is_looked_at():
    with Served(PacedEngine(counting(2))) as served:
        body = {"text": ["a", "b"], "rid": ["mine", "x" * 257]}
        assert refused(served, "/generate", body)[2]["param"] == "rid"
        headers, raw = ask(served, "/generate", {**body, "rid": ["mine", "yours"]})
        assert [each["meta_info"]["id"] for each in json.loads(raw)] == ["mine", "yours"]
        assert [add.name for add in served.engine.adds] == ["mine", "yours"]
        assert headers["x-request-id"] not in ("mine", "yours")


@pytest.mark.parametrize("given", ["mine", None])
def test_prompts_of_one_name_get_their_own_and_end_by_both(given: str | None):
    with Served(PacedEngine(counting(40))) as served, ThreadPoolExecutor(1) as client:
        served.engine.hold()
        body = {"text": ["a", "b", "c"], "rid": given, "sampling_params": {"n": 2}}
        answer = client.submit(ask, served, "/generate", body, **{"X-Request-Id": "theirs"})
        until(lambda: len(served.engine.adds) == 6, "its requests")
        call = given or "theirs"
        for name, count in ((f"{call}_1", 1), (call, 2), (call, 0)):
            said = json.loads(ask(served, "/abort_request", {"rid": name})[1])
            assert said == {"aborted": count}
        served.engine.held.set()
        headers, raw = answer.result()
    made = [each["meta_info"] for each in json.loads(raw)]
    assert headers["x-request-id"] == call
    assert [each["id"] for each in made] == [f"{call}_{place // 2}" for place in range(6)]
    assert {each["finish_reason"]["type"] for each in made} == {"abort"}
    assert {(add.name, add.call) for add in served.engine.adds} == {
        (f"{call}_{place}", call) for place in range(3)
    }


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {}, {"stream": True}])
def test_an_echo_that_is_aborted_has_the_chances_that_came(more: dict[str, object]):
    """None has come of this prompt: only its first token, which has no chance, is listed."""
    with Served(PacedEngine(counting(40))) as served, ThreadPoolExecutor(1) as client:
        served.engine.hold()
        body = {"prompt": "a b c", "echo": True, "logprobs": 1, "rid": "mine", **more}
        answer = client.submit(ask, served, "/v1/completions", body)
        until(lambda: len(served.engine.adds) == 1, "its request")
        assert json.loads(ask(served, "/abort_request", {"rid": "mine"})[1]) == {"aborted": 1}
        served.engine.held.set()
        parts = [json.loads(part) for part in EVENT.split(answer.result()[1]) if part.strip()]
    first, last = parts[0]["choices"][0], parts[-1]["choices"][0]
    assert (first["text"], last["finish_reason"]) == ("a b c", "abort")
    assert first["logprobs"]["token_logprobs"] == [None]
    assert len(first["logprobs"]["tokens"]) == 1


def test_one_prompt_of_several_is_aborted_by_its_name():
    """With all of its choices, and without the others."""
    with Served(PacedEngine(counting(40))) as served, ThreadPoolExecutor(1) as client:
        served.engine.hold()
        body = {"text": ["a", "b"], "rid": ["mine", "yours"], "sampling_params": {"n": 2}}
        answer = client.submit(ask, served, "/generate", body)
        until(lambda: len(served.engine.adds) == 4, "its requests")
        assert json.loads(ask(served, "/abort_request", {"rid": "mine"})[1]) == {"aborted": 1}
        served.engine.held.set()
        made = [each["meta_info"] for each in json.loads(answer.result()[1])]
    assert [(each["id"], each["finish_reason"]["type"]) for each in made] == [
        ("mine", "abort"),
        ("mine", "abort"),
        ("yours", "length"),
        ("yours", "length"),
    ]


def test_a_session_comes_from_a_header_too():
    with Served(PacedEngine(counting(2))) as served:
        headers, _ = ask(served, "/v1/completions", completion(), **{"X-Session-Id": "s-2"})
        assert headers["x-session-id"] == "s-2"
        headers, _ = ask(served, "/health", **{"X-Session-Id": "no name"})
        assert "x-session-id" not in headers


def test_a_trace_is_passed_on_with_a_parent_of_ours(caplog: pytest.LogCaptureFixture):
    with Served(PacedEngine(counting(2))) as served:
        headers, _ = ask(served, "/v1/completions", completion(stream=True), traceparent=PARENT)
        assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-01", headers["traceparent"])
        assert headers["traceparent"] != PARENT
        headers, _ = ask(served, "/health")
        assert "traceparent" not in headers
        served.service.tokenizer = None
        refused(served, "/v1/completions", completion(), traceparent=PARENT)
    assert f"of trace 00-{TRACE}-" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
        PARENT.replace("b7ad6b7169203331", "0" * 16).encode(),
        PARENT.upper().encode(),
        PARENT.encode() + b"-more",
        b"ff" + PARENT.encode()[2:],
    ],
)
def test_what_is_no_traceparent_is_passed_over(given: bytes):
    assert request_ids.address({b"traceparent": given})["trace"] == ""
