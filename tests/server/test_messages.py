"""/v1/messages, as Anthropic's clients speak: blocks in, blocks out, and the events between them.

What the model is asked is compared with /v1/chat/completions, which gets the same conversation.
"""

from __future__ import annotations

import http.client
import json
from email.message import Message
from typing import Any

import pytest

from ess.models.chat.styles import DeepSeekStyle
from ess.server.process.bounds import LOOP_BODY_BYTES
from tests.server.harness import TOKENIZER, PacedEngine, Served, saying
from tests.server.tool_calls import ARGUMENTS, REASONING, REPLY

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"name": name, "description": f"{name}?", "input_schema": SCHEMA} for name in ("tide", "now")
]
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"{name}?", "parameters": SCHEMA},
    }
    for name in ("tide", "now")
]
ASKED = [{"role": "user", "content": "When?"}]
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
CHAT_THINKING = {"chat_template_kwargs": {"thinking": True}}
PATH = "/v1/messages"


def exchange(
    served: Served, path: str, body: Any, *, method: str = "POST", **headers: str
) -> tuple[int, Message, str]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    connection.request(method, path, json.dumps(body), headers)
    answer = connection.getresponse()
    reply = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return reply


def create(served: Served, path: str = PATH, **asked: Any) -> Any:
    status, _, text = exchange(served, path, {"max_tokens": 400, "messages": ASKED, **asked})
    assert status == 200, text
    return json.loads(text)


def streamed(served: Served, **asked: Any) -> list[Any]:
    body = {"max_tokens": 400, "messages": ASKED, "stream": True, **asked}
    status, headers, text = exchange(served, PATH, body)
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream"), text
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        named, said = event.split("\n")
        events.append(json.loads(said.removeprefix("data: ")))
        assert named == f"event: {events[-1]['type']}"
    return events


def put_together(events: list[Any]) -> Any:
    """The document that a client makes of a stream."""
    first, *rest = events
    document, parts = first["message"], {}
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(document["content"])
                document["content"].append(event["content_block"])
                parts[event["index"]] = ""
            case "content_block_delta":
                [text] = (value for key, value in event["delta"].items() if key != "type")
                parts[event["index"]] += text
            case "content_block_stop":
                block, text = document["content"][event["index"]], parts.pop(event["index"])
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text or "{}")
                else:
                    block[block["type"]] = text
            case "message_delta":
                document |= {**event["delta"], "usage": event["usage"]}
    assert (parts, rest[-1]) == ({}, {"type": "message_stop"})
    return document


def nameless(document: Any) -> Any:
    """Without the ids, which are each answer's own."""
    content = [{k: v for k, v in block.items() if k != "id"} for block in document["content"]]
    return {**document, "id": "", "content": content}


def asked_of(served: Served) -> tuple[list[int], Any]:
    add = served.engine.adds[-1]
    return add.prompt, add.sampling


def same_in_chat(served: Served, asked: dict[str, Any], chat: dict[str, Any]) -> str:
    """The prompt, once it is the same in both dialects and drawn from in the same way."""
    wishes = {"max_tokens": 77, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5}
    create(served, **{"messages": ASKED, **wishes, **asked})
    here = asked_of(served)
    create(served, "/v1/chat/completions", **{"messages": ASKED, **wishes, **chat})
    assert here == asked_of(served)
    assert (here[1].tokens_max, here[1].temperature, here[1].top_k) == (77, 0.5, 7)
    return TOKENIZER.decode(here[0])


# ---- answers


def test_a_text_is_answered(plain: Served):
    made = create(plain, system="Be brief.", model="test-model", metadata={"user_id": "u"})
    assert made["content"] == [{"type": "text", "text": " It is noon."}]
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "test-model")
    assert (made["stop_reason"], made["stop_sequence"]) == ("end_turn", None)
    assert made["id"].startswith("msg_")
    assert made["usage"] == {
        "input_tokens": len(asked_of(plain)[0]) - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": len(TOKENIZER.encode(" It is noon.")) + 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert TOKENIZER.decode(asked_of(plain)[0]) == "system: Be brief.\nuser: When?\nassistant:"


def test_why_it_ended_is_said(plain: Served):
    made = create(plain, max_tokens=2)
    assert (made["stop_reason"], made["usage"]["output_tokens"]) == ("max_tokens", 2)
    for message in (
        create(plain, stop_sequences=["xyz", "noon"]),
        put_together(streamed(plain, stop_sequences=["xyz", "noon"])),
    ):
        assert message["content"] == [{"type": "text", "text": " It is "}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "noon")


def test_a_stream_adds_up_to_the_whole(plain: Served):
    events = streamed(plain)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 2
    assert kinds == [
        *("message_start", "content_block_start", *["content_block_delta"] * deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["cache_read_input_tokens"] == 2
    assert nameless(put_together(events)) == nameless(create(plain))


def test_thoughts_and_calls_come_whole_and_in_events(calling: Served):
    whole = create(calling, tools=TOOLS, **THINKING)
    thought, text, tide, now = whole["content"]
    assert thought == {"type": "thinking", "thinking": REASONING, "signature": ""}
    assert text == {"type": "text", "text": "Let me look."}
    assert (tide["type"], tide["name"], tide["input"]) == ("tool_use", "tide", ARGUMENTS)
    assert (now["type"], now["name"], now["input"]) == ("tool_use", "now", {})
    assert tide["id"] != now["id"]
    assert whole["stop_reason"] == "tool_use"
    thought_count = whole["usage"]["output_tokens_details"]["thinking_tokens"]
    said_count = len(TOKENIZER.encode(REPLY[REPLY.index("Let me look.") :]))
    assert 0 < thought_count < whole["usage"]["output_tokens"] - said_count
    assert nameless(put_together(streamed(calling, tools=TOOLS, **THINKING))) == nameless(whole)
    assert nameless(create(calling, tools=TOOLS, **CHAT_THINKING)) == nameless(whole)
    plain = nameless(create(calling))
    assert nameless(create(calling, **THINKING, chat_template_kwargs={"thinking": False})) == plain
    begun = [*ASKED, {"role": "assistant", "content": "It"}]
    for asked in (THINKING, CHAT_THINKING):
        assert create(calling, messages=begun, **asked)["content"][0]["type"] == "text"


def test_thoughts_that_are_omitted_are_counted(calling: Served):
    hidden = {"thinking": {**THINKING["thinking"], "display": "omitted"}}
    shown, whole = create(calling, tools=TOOLS, **THINKING), create(calling, tools=TOOLS, **hidden)
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}
    shown["content"][0]["thinking"] = ""
    assert nameless(whole) == nameless(shown), "the usage too"
    events = streamed(calling, tools=TOOLS, **hidden)
    assert not [e for e in events if e.get("delta", {}).get("type") == "thinking_delta"]
    assert nameless(put_together(events)) == nameless(whole)


@pytest.mark.parametrize("thinking", [{}, THINKING])
def test_no_tokens_warm_the_cache(calling: Served, thinking: dict[str, Any]):
    whole = create(calling, max_tokens=0, **thinking)
    assert (whole["content"], whole["stop_reason"]) == ([], "max_tokens")
    assert whole["usage"]["output_tokens"] == 0
    assert whole["usage"]["input_tokens"] == len(asked_of(calling)[0])
    assert asked_of(calling)[1].tokens_max == 1
    assert nameless(put_together(streamed(calling, max_tokens=0, **thinking))) == nameless(whole)


def test_half_a_call_is_no_block_of_the_whole(calling: Served):
    count = len(TOKENIZER.encode(REPLY[: REPLY.index("Ulm")]))
    whole = create(calling, tools=TOOLS, max_tokens=count, **THINKING)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert whole["stop_reason"] == "max_tokens"
    events = streamed(calling, tools=TOOLS, max_tokens=count, **THINKING)
    assert [event["type"] for event in events[-3:]] == [
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_tokens_are_counted_as_they_are_charged(calling: Served):
    asked = {"system": "Be brief.", "tools": TOOLS, **THINKING}
    counted = create(calling, f"{PATH}/count_tokens", **asked)
    assert counted == {"input_tokens": create(calling, **asked)["usage"]["input_tokens"]}
    assert counted["input_tokens"] == len(asked_of(calling)[0])


def test_a_long_body_is_read_apart(plain: Served):
    """In a text process, in the same style."""
    long = {"metadata": {"user_id": "u" * LOOP_BODY_BYTES}}
    assert same_in_chat(plain, long, long) == "user: When?\nassistant:"
    counted = create(plain, f"{PATH}/count_tokens", **long)
    assert counted == {"input_tokens": len(asked_of(plain)[0])}


# ---- what the model is asked


def test_a_conversation_is_the_chat_s(plain: Served):
    prompt = same_in_chat(
        plain,
        {
            "system": [
                {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                *ASKED,
            ],
        },
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": ""},
                *ASKED,
            ]
        },
    )
    assert prompt == "system: Be brief.\nuser: Hi\nassistant: \nuser: When?\nassistant:"


def test_what_coding_agents_send_is_served(calling: Served):
    """Reminders of the system between messages, marks for the cache, effort, edits of context."""
    mark = {"cache_control": {"type": "ephemeral"}}
    reminder = {"type": "text", "text": "Be brief.", **mark}
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    same_in_chat(
        calling,
        {
            "messages": [
                {"role": "system", "content": "You help."},
                *(*ASKED, {"role": "assistant", "content": "Now."}),
                *({"role": "system", "content": [reminder]}, *ASKED),
            ],
            "system": "You are it.",
            "tools": [{**tool, **mark, "type": "custom"} for tool in TOOLS],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "medium"},
            "context_management": {"edits": edits},
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
        },
        {
            "messages": [
                {"role": "system", "content": "You are it.\n\nYou help."},
                *(*ASKED, {"role": "assistant", "content": "Now."}),
                {"role": "user", "content": "Be brief.\n\nWhen?"},
            ],
            "tools": CHAT_TOOLS,
            **CHAT_THINKING,
        },
    )


def test_blocks_go_back_in(calling: Served):
    content = create(calling, tools=TOOLS, **THINKING)["content"]
    identities = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": identities[0], "content": "5 pm"},
        {
            "type": "tool_result",
            "tool_use_id": identities[1],
            "content": [{"type": "text", "text": "4 "}, {"type": "text", "text": "pm"}],
        },
    ]
    more = [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]
    calls = [
        {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
        for identity, name, arguments in zip(
            identities,
            ("tide", "now"),
            (json.dumps(ARGUMENTS, ensure_ascii=False), "{}"),
            strict=True,
        )
    ]
    said = {"role": "assistant", "content": "Let me look.", "reasoning_content": REASONING}
    prompt = same_in_chat(
        calling,
        {
            "messages": [
                *ASKED,
                {"role": "assistant", "content": content},
                {"role": "user", "content": [*results, *more]},
            ],
            "tools": TOOLS,
            **THINKING,
        },
        {
            "messages": [
                *ASKED,
                {**said, "tool_calls": calls},
                {"role": "tool", "tool_call_id": identities[0], "content": "5 pm"},
                {"role": "tool", "tool_call_id": identities[1], "content": "4 pm"},
                {"role": "user", "content": "And then?"},
            ],
            "tools": CHAT_TOOLS,
            **CHAT_THINKING,
        },
    )
    assert "<result>5 pm</result>\n<result>4 pm</result>" in prompt


def test_the_last_message_may_be_the_answer_s_beginning(calling: Served):
    begun = [*ASKED, {"role": "assistant", "content": "It is"}]
    chat = {"continue_final_message": True, "add_generation_prompt": False}
    prompt = same_in_chat(calling, {"messages": begun, **THINKING}, {"messages": begun, **chat})
    assert prompt.endswith("It is")


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "now"},
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        ),
    ],
)
def test_choices_of_tools_are_the_chat_s(calling: Served, choice: Any, chat: Any):
    prompt = same_in_chat(
        calling, {"tools": TOOLS, "tool_choice": choice}, {"tools": CHAT_TOOLS, **chat}
    )
    sampling = asked_of(calling)[1]
    assert (sampling.grammar is None) == (choice["type"] in ("auto", "none"))
    assert ("tide?" in prompt) == (choice["type"] in ("auto", "any"))


def test_a_form_is_the_chat_s(calling: Served):
    form = {"type": "json_schema", "schema": SCHEMA}
    chat = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    same_in_chat(
        calling, {"output_config": {"format": form, "effort": "low"}}, {"response_format": chat}
    )
    assert json.loads(asked_of(calling)[1].grammar.text) == SCHEMA


@pytest.mark.parametrize("effort", ["high", "max"])
def test_effort_is_the_chat_s(effort: str):
    with Served(PacedEngine(saying(REPLY)), style=DeepSeekStyle.v4(), is_marked=True) as served:
        prompt = same_in_chat(
            served,
            {**THINKING, "output_config": {"effort": effort}},
            {**CHAT_THINKING, "reasoning_effort": effort},
        )
    assert "Reasoning Effort: " in prompt


# ---- the client itself


def test_the_client_s_own_reader_accepts_all_of_it(calling: Served):
    anthropic = pytest.importorskip("anthropic", reason="`anthropic` of extra `dev` is missing")
    with anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0) as client:
        [model] = client.models.list()
        assert (model.id, model.type, client.models.retrieve(model.id)) == (
            "test-model",
            "model",
            model,
        )
        asked = {"model": "test-model", "max_tokens": 400, "messages": ASKED, "tools": TOOLS}
        whole = client.messages.create(**asked, **THINKING)
        with client.messages.stream(**asked, **THINKING) as stream:
            final = stream.get_final_message()
        for made in (whole, final):
            thought, text, tide, _ = made.content
            assert (thought.thinking, text.text) == (REASONING, "Let me look.")
            assert tide.input == ARGUMENTS
            assert (made.stop_reason, made.id) == ("tool_use", f"msg_{made.id[4:]}")
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**{**asked, "max_tokens": 9999})
        assert caught.value.request_id
