"""What /v1/messages refuses, in the form that Anthropic's clients read; nothing is left behind."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from email.message import Message
from typing import Any

import pytest

from ess.models.chat.styles import DeepSeekStyle
from ess.server.process.service import Limits
from tests.server.harness import PacedEngine, Served, counting, saying, until
from tests.server.test_messages import ASKED, PATH, TOOLS, exchange

SMALL = Limits(running_max=1, waiting_max=0, length_max=4096, body_max=2000)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(PacedEngine(saying("Yes.")), style=DeepSeekStyle(), is_marked=True) as made:
        yield made


def blocks(*given: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(given)}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}

SAID = {"role": "assistant", "content": "Yes."}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "5"}
UNASKED = [SAID, {"role": "user", "content": [RESULT]}]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"thinking": {"type": "enabled", "display": "full"}}, "thinking.display is 'full'"),
        ({"max_tokens": 9999}, "max_tokens is 9,999"),
        ({"messages": []}, "messages is empty: give at least one message"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role is ['user']"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role is 'tool'"),
        (blocks(IMAGE, role="system"), "'image'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (blocks(), "messages[0].content"),
        (blocks("text"), "content[0].type is 'str'"),
        (blocks(IMAGE), "content[0].type is 'image'"),
        (blocks({"type": "document", "source": {}}), "'document'"),
        (blocks({"type": "text", "text": 5}), "content[0].text is a number"),
        (blocks({"type": "tool_result"}), "content[0].tool_use_id"),
        (
            blocks({"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}),
            "content[0].content has a part of type 'image'",
        ),
        (blocks({"type": "tool_use"}), "of the user text and tool_result"),
        (blocks({"type": "tool_use", "id": "x", "name": "y"}, role="assistant"), "input"),
        (blocks(IMAGE, role="assistant"), "'image'"),
        ({"messages": [*ASKED, *ASKED, *UNASKED]}, "messages[3] begins 1 tool results"),
        ({"messages": [*ASKED, *ASKED, SAID | {"content": " "}]}, "messages[2] is to be continued"),
        ({"system": [IMAGE]}, "system has a part of type 'image'"),
        ({"system": "x " * 5000}, "messages: the prompt has"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "y"}}, "'y'"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "'required'"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"thinking": {"type": "on"}}, "thinking.type is 'on'"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": "x"}, "stop_sequences"),
        ({"n": 2}, "one answer"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not served"),
        ({"container": "c"}, "container is not served"),
        ({"thread": {"type": "continue", "previous_message_id": "m"}}, "thread is not served"),
        ({"compaction": {"type": "summarize"}}, "compaction is not served"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_what_is_not_served_is_refused_by_name(served: Served, changed: Any, says: str):
    before = len(served.engine.adds)
    body = {"max_tokens": 5, "messages": ASKED, **changed}
    for stream in (False, True):
        status, headers, text = exchange(served, PATH, {**body, "stream": stream})
        document = json.loads(text)
        error = document.pop("error")
        assert (status, error["type"]) == (400, "invalid_request_error"), text
        assert says in error["message"]
        assert document == {"type": "error", "request_id": headers["request-id"]}
    assert len(served.engine.adds) == before
    assert served.service.link.open_count == 0


def kind_of(answer: tuple[int, Message, str]) -> tuple[int, str]:
    status, _, text = answer
    document = json.loads(text)
    assert (document["type"], set(document["error"])) == ("error", {"type", "message"})
    return status, document["error"]["type"]


def test_every_refusal_has_this_form():
    body = {"max_tokens": 5, "messages": ASKED}
    key = {"X-Api-Key": "right"}
    with Served(PacedEngine(counting(10)), keys=("right",), limits=SMALL) as served:
        assert kind_of(exchange(served, PATH, body)) == (401, "authentication_error")
        wrong = exchange(served, PATH, body, **{"X-Api-Key": "wrong"})
        assert kind_of(wrong) == (401, "authentication_error")
        assert exchange(served, PATH, body, **key)[0] == 200
        assert exchange(served, PATH, body, Authorization="Bearer right")[0] == 200
        unknown = exchange(served, PATH, {**body, "model": "x"}, **key)
        assert kind_of(unknown) == (404, "not_found_error")
        assert kind_of(exchange(served, f"{PATH}/x", body, **key)) == (404, "not_found_error")
        got = exchange(served, PATH, None, method="GET", **key)
        assert kind_of(got) == (405, "invalid_request_error")
        long = exchange(served, PATH, {**body, "system": "x" * 3000}, **key)
        assert kind_of(long) == (413, "request_too_large")
        named = exchange(served, PATH, {**body, "n": 2}, **key, **{"X-Request-Id": "mine"})
        assert (named[1]["request-id"], json.loads(named[2])["request_id"]) == ("mine", "mine")
        version = {"anthropic-version": "2023-06-01", "X-Request-Id": "mine", **key}
        for path in ("/v1/models/x", "/v1/files"):
            absent = exchange(served, path, None, method="GET", **version)
            assert kind_of(absent) == (404, "not_found_error")
            assert absent[1]["request-id"] == json.loads(absent[2])["request_id"] == "mine"


def test_a_prefix_changes_no_form():
    with Served(PacedEngine(saying("Yes.")), root_path="/llm") as served:
        for path in (f"/llm{PATH}", PATH):
            assert kind_of(exchange(served, path, {})) == (400, "invalid_request_error")
            assert exchange(served, path, {"max_tokens": 5, "messages": ASKED})[0] == 200


def test_overload_says_when_to_come_back():
    body = {"max_tokens": 3000, "messages": ASKED}
    engine = PacedEngine(counting(10**6), pace_s=0.005)
    with Served(engine, limits=SMALL) as served:
        held = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        held.request("POST", PATH, json.dumps({**body, "stream": True}))
        assert held.getresponse().read(40).startswith(b"event: message_start\n")
        refused = exchange(served, PATH, body)
        assert kind_of(refused) == (503, "overloaded_error")
        assert (int(refused[1]["retry-after"]) >= 1, refused[1]["x-ess-reason"]) == (
            *(True, "queue_full"),
        )
        held.close()
        until(lambda: engine.aborted == [engine.adds[0].number], "the abort")
        assert served.service.link.open_count == 0


def test_a_lost_engine_ends_a_stream_with_an_error_event():
    engine = PacedEngine(counting(10**6), pace_s=0.005)
    with Served(engine) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        body = {"max_tokens": 3000, "messages": ASKED, "stream": True}
        connection.request("POST", PATH, json.dumps(body), {"X-Request-Id": "mine"})
        answer = connection.getresponse()
        told = answer.read(40)
        served.call(lambda: served.service.link.lose("the test pulled the plug"))
        told += answer.read()
        connection.close()
    named, said = told.decode().removesuffix("\n\n").split("\n\n")[-1].split("\n")
    document = json.loads(said.removeprefix("data: "))
    assert (named, document["request_id"]) == ("event: error", "mine")
    assert document["error"]["type"] == "api_error"
    assert "pulled the plug" in document["error"]["message"]
