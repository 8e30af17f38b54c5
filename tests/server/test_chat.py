"""/v1/chat/completions: messages, reasoning, tools and their streams, with the `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.server.harness import TOKENIZER, PacedEngine, Served, saying
from tests.server.tool_calls import ARGUMENTS, REASONING

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("tide", "now")
]
ASKED = [{"role": "user", "content": "When is high tide?"}]
TWO_FIRST = [{"role": role, "content": "Be brief."} for role in ("system", "developer")]


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with Served(PacedEngine(saying(" It is noon.\nuser: and then?"), cached_count=2)) as made:
        yield made


def allowed(mode: str, *names: str):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def create(served: Served, **asked):
    client = served.client()
    asked = {"model": "test-model", "messages": ASKED, "max_tokens": 400, **asked}
    return client.chat.completions.create(**asked)


def test_a_message_ends_where_the_format_says(plain: Served):
    made = create(plain)
    [choice] = made.choices
    assert choice.message.content == " It is noon."
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert made.usage.prompt_tokens_details.cached_tokens == 2
    prompt = TOKENIZER.decode(plain.engine.adds[-1].prompt)
    assert prompt == "user: When is high tide?\nassistant:"


def test_a_streamed_message_is_the_same(plain: Served):
    chunks = list(create(plain, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == " It is noon."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(TOKENIZER.encode(" It is noon.\nuser:"))


def test_choices_stream_beside_each_other(plain: Served):
    said = {0: "", 1: "", 2: ""}
    for chunk in create(plain, stream=True, n=3):
        [choice] = chunk.choices
        said[choice.index] += choice.delta.content or ""
    assert set(said.values()) == {" It is noon."}


def test_a_chat_s_prompt_has_chances_too(plain: Served):
    made = create(plain, max_tokens=2, extra_body={"prompt_logprobs": 0})
    prompt = plain.engine.adds[-1].prompt
    nothing, *chances = made.prompt_logprobs
    assert nothing is None
    assert [list(each) for each in chances] == [[str(token)] for token in prompt[1:]]


def test_logprobs_stream_and_do_not(plain: Served):
    whole = create(plain, logprobs=True, top_logprobs=2, max_tokens=3)
    entries = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == whole.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
    assert bytes(entries[0].bytes).decode() == entries[0].token
    streamed = [
        entry
        for chunk in create(plain, logprobs=True, top_logprobs=2, max_tokens=3, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_tool_calls_and_reasoning(calling: Served):
    made = create(calling, tools=TOOLS, extra_body={"chat_template_kwargs": {"thinking": True}})
    [choice] = made.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == REASONING
    assert choice.message.content == "Let me look."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "tide")
    assert json.loads(first.function.arguments) == ARGUMENTS
    assert (second.function.name, json.loads(second.function.arguments)) == ("now", {})
    assert first.id != second.id
    prompt = TOKENIZER.decode(calling.engine.adds[-1].prompt)
    assert '"name": "tide"' in prompt
    assert prompt.endswith("<think>")


def test_tool_calls_stream(calling: Served):
    asked = {"chat_template_kwargs": {"thinking": True}}
    reasoning, content, names, arguments, finish = "", "", {}, {}, None
    for chunk in create(calling, tools=TOOLS, stream=True, extra_body=asked):
        [choice] = chunk.choices
        finish = choice.finish_reason or finish
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                names[call.index] = call.function.name
                assert call.id.startswith("call_")
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    assert (reasoning, content) == (REASONING, "Let me look.")
    assert names == {0: "tide", 1: "now"}
    assert json.loads(arguments[0]) == ARGUMENTS
    assert len(arguments[0]) > 20
    assert json.loads(arguments[1] or "{}") == {}
    assert finish == "tool_calls"


def test_tool_choice_decides_what_the_prompt_shows(calling: Served):
    create(calling, tools=TOOLS, tool_choice="none", max_tokens=1)
    assert "tide" not in TOKENIZER.decode(calling.engine.adds[-1].prompt).replace("high tide", "")
    named = {"type": "function", "function": {"name": "now"}}
    for choice in (named, allowed("auto", "now"), allowed("required", "now", "now")):
        create(calling, tools=TOOLS, tool_choice=choice, max_tokens=1)
        prompt = TOKENIZER.decode(calling.engine.adds[-1].prompt)
        assert prompt.count('"name": "now"') == 1
        assert '"name": "tide"' not in prompt


def test_a_results_turn_goes_back_into_the_prompt(calling: Served):
    first = create(calling, tools=TOOLS).choices[0].message
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    again = [*ASKED, {"role": "assistant", "content": first.content, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
    create(calling, tools=TOOLS, messages=[*again, result], max_tokens=1)
    assert "<result>12:00</result>" in TOKENIZER.decode(calling.engine.adds[-1].prompt)


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
            "json_schema",
            '{"type": "integer"}',
        ),
    ],
)
def test_a_response_format_reaches_the_engine(plain: Served, form, kind, text):
    create(plain, response_format=form)
    grammar = plain.engine.adds[-1].sampling.grammar
    assert (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"messages": []}, "messages is empty: give at least one message"),
        (
            {"messages": [{"role": "king", "content": "x"}]},
            "messages[0].role is 'king'; served are system, developer, user, assistant, tool",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"messages": [*TWO_FIRST, {"role": "king"}]}, "messages[2].role is 'king'"),
        ({"top_logprobs": 3}, "top_logprobs must come with logprobs"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": "perhaps"}, "tool_choice is 'perhaps'"),
        ({"tool_choice": {"function": {"name": "x"}}}, "the name 'x'"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type is 'mcp'"),
        ({"tool_choice": allowed("auto", "x"), "tools": TOOLS}, "the name 'x'"),
        ({"tool_choice": allowed("none", "now"), "tools": TOOLS}, "mode is 'none', must be auto"),
        ({"tool_choice": allowed("auto"), "tools": TOOLS}, "tools must be a list of 1"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"modalities": ["audio"]}, "only text"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
    ],
)
def test_a_wrong_conversation_is_explained(plain: Served, changed, says):
    before = len(plain.engine.adds)
    with pytest.raises(openai.BadRequestError) as caught:
        create(plain, **changed)
    assert says in caught.value.message
    assert len(plain.engine.adds) == before


def test_max_completion_tokens_is_the_newer_name(plain: Served):
    create(plain, max_tokens=openai.omit, max_completion_tokens=5)
    assert plain.engine.adds[-1].sampling.tokens_max == 5
    create(plain, max_tokens=openai.omit)
    assert plain.engine.adds[-1].sampling.tokens_max == plain.service.limits.tokens_default
