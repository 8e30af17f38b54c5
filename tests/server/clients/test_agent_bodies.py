"""Bodies in the shapes that coding agents and chat front ends send: each is served, and what the
model is asked has all that they say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.harness import TOKENIZER, Served
from tests.server.test_messages import exchange
from tests.server.tool_calls import ARGUMENTS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
    "required": ["city"],
    "additionalProperties": False,
}
TIDE = {"name": "tide", "description": "tide?", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": {**TIDE, "strict": False}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "tide", "arguments": "{}"}}


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def asked(served: Served, path: str, body: dict[str, Any], **headers: str) -> str:
    """The answer's text, once the status is 200."""
    status, _, text = exchange(served, path, body, **headers)
    assert status == 200, text
    return text


def prompt_of(served: Served) -> str:
    return TOKENIZER.decode(served.engine.adds[-1].prompt)


def codex(**more: Any) -> dict[str, Any]:
    """The Responses API alone: instructions, messages of a developer and of the user, functions,
    a search that its servers would run, and the functions of an MCP server in a namespace."""
    texts = [("developer", "<permissions>"), ("user", "<environment_context>"), ("user", "When?")]
    return {
        "model": "test-model",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
            for role, text in texts
        ],
        "tools": [
            {"type": "function", **TIDE, "strict": False},
            {"type": "web_search", "external_web_access": False},
            {
                "type": "namespace",
                "name": "mcp__clock",
                "description": "Tools of the server clock.",
                "tools": [{"type": "function", **TIDE, "name": "now", "defer_loading": False}],
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": None,
        "prompt_cache_key": "0197c0f2-thread",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "1"},
        **more,
    }


def test_codex(calling: Served):
    """Also its second turn: reasoning without its content, a call, and a call's output as parts."""
    headers = {"originator": "codex_cli_rs", "accept": "text/event-stream", "session-id": "1"}
    events = events_of(asked(calling, "/v1/responses", codex(), **headers))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items][:3] == ["reasoning", "message", "function_call"]
    assert events[-1]["type"] == "response.completed"
    assert {*events[-1]["response"]["usage"]} >= {"input_tokens", "output_tokens", "total_tokens"}
    first = prompt_of(calling)
    for text in ("You are a coding agent.", "<permissions>", "<environment_context>", "When?"):
        assert text in first
    assert '"name": "mcp__clock__now"' in first
    assert first.index("<permissions>") < first.index("## Tools"), "it is the system's"
    said = [
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": items[1]["content"]},
        {
            "type": "function_call",
            "name": "now",
            "namespace": "mcp__clock",
            "arguments": json.dumps(ARGUMENTS),
            "call_id": items[2]["call_id"],
        },
        {
            "type": "function_call_output",
            "call_id": items[2]["call_id"],
            "output": [{"type": "input_text", "text": "high at 5"}],
        },
    ]
    asked(calling, "/v1/responses", codex(input=[*codex()["input"], *said]), **headers)
    assert 'invoke name="mcp__clock__now"' in prompt_of(calling)
    assert "<result>high at 5</result>" in prompt_of(calling)


def test_a_developer_at_the_beginning_is_the_system(calling: Served):
    """DeepSeek's format drops what a developer said before the last question."""
    turns = [("developer", "Be brief."), ("user", "Hi"), ("assistant", "Hi."), ("user", "When?")]
    talk = [{"role": role, "content": text} for role, text in turns]
    prompts = []
    texts = {"developer": "brief.", "system": [{"type": "text", "text": "Be"}]}
    for speakers in ("developer",), ("system",), ("system", "developer"):
        first = [{"role": role, "content": texts[role]} for role in speakers]
        if len(first) == 1:
            first[0]["content"] = "Be\n\nbrief."
        body = {"messages": [*first, *talk[1:]], "reasoning_effort": "high"}
        asked(calling, "/v1/chat/completions", {"max_tokens": 5, **body})
        prompts.append(prompt_of(calling))
        given = {"input": body["messages"], "reasoning": {"effort": "high"}}
        asked(calling, "/v1/responses", {"max_output_tokens": 5, **given})
        prompts.append(prompt_of(calling))
    assert len({*prompts}) == 1
    assert "Be\n\nbrief." in prompts[0]
    late = [*talk[1:], {"role": "developer", "content": "Be long."}, talk[3]]
    asked(calling, "/v1/responses", {"input": late, "reasoning": {"effort": "high"}})
    assert "<｜User｜>Be long." in (prompt := prompt_of(calling))
    asked(calling, "/v1/chat/completions", {"messages": late, "reasoning_effort": "high"})
    assert prompt_of(calling) == prompt


def claude_code(**more: Any) -> dict[str, Any]:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return {
        "model": "test-model",
        "max_tokens": 400,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
            {"type": "text", "text": "You are Claude Code.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>A</system-reminder>"},
                    {"type": "text", "text": "When?", **cached},
                ],
            }
        ],
        "tools": [
            {
                "name": "tide",
                "description": "tide?",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **PARAMETERS,
                },
                "eager_input_streaming": True,
            }
        ],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        "stream": True,
        **more,
    }


BETA = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
}


def test_claude_code(calling: Served):
    events = events_of(asked(calling, "/v1/messages?beta=true", claude_code(), **BETA))
    assert events[-1]["type"] == "message_stop"
    blocks = [event["content_block"] for event in events if "content_block" in event]
    [call, *_] = [block for block in blocks if block["type"] == "tool_use"]
    for text in ("You are Claude Code.", "<system-reminder>A</system-reminder>When?", "tide?"):
        assert text in prompt_of(calling)
    turn = [
        {"type": "thinking", "thinking": "By the moon.", "signature": ""},
        {"type": "text", "text": "Let me look."},
        {**call, "input": ARGUMENTS, "caller": {"type": "direct"}},
    ]
    result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": True}
    results = [
        {**result, "content": [{"type": "text", "text": "no tide"}]},
        {"type": "text", "text": "Try again.", "cache_control": {"type": "ephemeral"}},
    ]
    talk = [
        *claude_code()["messages"],
        {"role": "assistant", "content": turn},
        {"role": "user", "content": results},
    ]
    asked(calling, "/v1/messages?beta=true", claude_code(messages=talk), **BETA)
    assert "no tide" in prompt_of(calling)
    counted = {key: claude_code()[key] for key in ("model", "messages", "tools", "system")}
    text = asked(calling, "/v1/messages/count_tokens?beta=true", counted, **BETA)
    assert json.loads(text)["input_tokens"] > 0


def test_claude_code_s_small_requests(plain: Served):
    """A test of the quota, and a title as JSON."""
    asked(plain, "/v1/messages", claude_code(
        max_tokens=1, system=None, tools=None, tool_choice=None, thinking=None, stream=False,
        messages=[{"role": "user", "content": "quota"}], context_management=None,
    ))  # fmt: skip
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    asked(plain, "/v1/messages", claude_code(tools=[], tool_choice=None, output_config=form))
    assert plain.engine.adds[-1].sampling.grammar is not None


CHATS: dict[str, dict[str, Any]] = {
    "Cline": {
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": CHAT_TOOLS,
        "messages": [
            {"role": "system", "content": "You are Cline."},
            {"role": "user", "content": [{"type": "text", "text": "When?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "at 5"},
        ],
    },
    "Continue": {
        "max_tokens": 400,
        "temperature": 0.5,
        "stream": True,
        "prediction": {"type": "content", "content": "x"},
        "tools": CHAT_TOOLS,
        "parallel_tool_calls": False,
        "messages": [
            {"role": "system", "content": "<important_rules>"},
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": " ", "tool_calls": [CALL]},
            {"role": "tool", "content": "at 5", "tool_call_id": "call_1"},
        ],
    },
    "aider": {
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Act as an expert software developer."},
            {"role": "user", "content": "Files:"},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": [{"type": "text", "text": "When?"}]},
        ],
    },
    "Open WebUI": {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_k": 40,
        "frequency_penalty": 0.1,
        "logit_bias": {"5": 1},
        "reasoning_effort": "low",
        "stop": ["###"],
        "seed": 5,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "When?"}]},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "By the moon.",
                "tool_calls": [{**CALL, "index": 0}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}]},
        ],
        "tools": CHAT_TOOLS,
    },
    "LibreChat": {
        "stream": True,
        "user": "65f0c0",
        "n": 1,
        "verbosity": "low",
        "reasoning": {"effort": "low", "summary": "auto"},
        "include_reasoning": True,
        "tools": CHAT_TOOLS,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "When?"}]},
        ],
    },
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(calling: Served, name: str):
    body = {"model": "test-model", **CHATS[name]}
    events = events_of(asked(calling, "/v1/chat/completions", body))
    assert events[-1].get("usage") or events[-1]["choices"][0]["finish_reason"]
    first = body["messages"][0]["content"]
    assert first in prompt_of(calling)
    assert "When?" in prompt_of(calling)
    assert ("tide?" in prompt_of(calling)) == ("tools" in body)
