"""/v1/responses with the `openai` client: items in, items out, and the events between them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ess.models.chat.reply import CallBegin, CallEnd
from ess.server.dialects.response_items import Items
from ess.server.dialects.tools import namespaces_of
from tests.server.harness import TOKENIZER, Served
from tests.server.tool_calls import ARGUMENTS, REASONING

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("tide", "now")
]

UNREAD = {"type": "function_call_output", "call_id": 5, "output": "x"}
SPACE = {"type": "namespace", "name": "sea", "tools": TOOLS}
THOUGHT = [
    {"role": "user", "content": "When?"},
    {"type": "reasoning", "content": []},
    {"role": "assistant", "content": "Soon."},
]


def client(served: Served) -> openai.OpenAI:
    return served.client()


def create(served: Served, **asked: Any) -> Any:
    """The response, or the list of its events; the client's connection is closed."""
    asked = {"model": "test-model", "input": "When?", **asked}
    with client(served) as own:
        made = own.responses.create(**asked)
        return list(made) if asked.get("stream") else made


def prompt_of(served: Served) -> str:
    return TOKENIZER.decode(served.engine.adds[-1].prompt)


def test_a_text_is_answered_and_nothing_is_kept(plain: Served):
    made = create(plain, instructions="Be brief.", max_output_tokens=50, temperature=0.5)
    assert made.output_text == " It is noon."
    [item] = made.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (made.status, made.store, made.object) == ("completed", False, "response")
    assert made.id.startswith("resp_")
    assert made.usage.input_tokens == len(plain.engine.adds[-1].prompt)
    assert made.usage.input_tokens_details.cached_tokens == 2
    assert made.usage.output_tokens == len(TOKENIZER.encode(" It is noon.")) + 1
    sampling = plain.engine.adds[-1].sampling
    assert (sampling.tokens_max, sampling.temperature) == (50, 0.5)
    assert prompt_of(plain) == "system: Be brief.\nuser: When?\nassistant:"


def test_what_is_cut_short_says_so(plain: Served):
    made = create(plain, max_output_tokens=2)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete"
    *_, last = create(plain, max_output_tokens=2, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_a_stream_is_the_same_in_order(plain: Served):
    events = create(plain, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == events[-1].response.output_text == " It is noon."
    assert deltas > 2
    assert events[0].response.id == events[-1].response.id


def test_the_client_s_own_reader_accepts_the_events(calling: Served):
    asked = {"model": "test-model", "input": "When?", "tools": TOOLS}
    with client(calling).responses.stream(**asked, reasoning={"effort": "high"}) as stream:
        final = stream.get_final_response()
    thought, message, tide, now = final.output
    assert [part.text for part in thought.content] == [REASONING]
    assert message.content[0].text == "Let me look."
    assert (tide.name, json.loads(tide.arguments)) == ("tide", ARGUMENTS)
    assert (now.name, json.loads(now.arguments)) == ("now", {})
    assert tide.call_id != now.call_id
    assert final.usage.output_tokens_details.reasoning_tokens == len(TOKENIZER.encode(REASONING))
    assert prompt_of(calling).endswith("<think>")


def test_calls_and_reasoning_come_whole_and_in_events(calling: Served):
    whole = create(calling, tools=TOOLS, reasoning={"effort": "low"})
    assert [item.type for item in whole.output] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    events = create(calling, tools=TOOLS, reasoning={"effort": "low"}, stream=True)
    done = {e.output_index: e for e in events if e.type.endswith("arguments.done")}
    assert {i: (e.name, json.loads(e.arguments)) for i, e in done.items()} == {
        2: ("tide", ARGUMENTS),
        3: ("now", {}),
    }
    for index, event in done.items():
        deltas = [e for e in events if e.type.endswith("arguments.delta")]
        assert "".join(e.delta for e in deltas if e.output_index == index) == event.arguments
    assert "tide" in prompt_of(calling)


def test_items_go_back_in(calling: Served):
    first = create(calling, tools=TOOLS, reasoning={"effort": "low"})
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"{item.name} is 5"}
        for item in first.output
        if item.type == "function_call"
    ]
    asked = {"role": "user", "content": [{"type": "input_text", "text": "When?"}]}
    items = [item.model_dump(exclude_none=True) for item in first.output]
    create(calling, input=[asked, *items, *results], tools=TOOLS, reasoning={"effort": "low"})
    prompt = prompt_of(calling)
    assert f"<think>{REASONING}</think>Let me look.\n\n<｜DSML｜function_calls>" in prompt
    assert "<result>tide is 5</result>\n<result>now is 5</result>" in prompt


def test_functions_of_a_namespace_have_its_name_too(calling: Served):
    """As Codex sends those of MCP servers. A tool that the server cannot run is left out."""
    inner = [{**TOOLS[0], "name": "ide"}, {**TOOLS[1], "name": "now"}]
    spaces = [
        {"type": "namespace", "name": "t", "description": "", "tools": inner[:1]},
        {"type": "namespace", "name": "mcp__", "description": "", "tools": inner[1:]},
    ]
    made = create(calling, tools=[*spaces, TOOLS[0], {"type": "web_search"}])
    prompt = prompt_of(calling)
    assert all(f'"name": "{name}"' in prompt for name in ("t__ide", "mcp__now", "tide"))
    assert "web_search" not in prompt
    assert [tool.type for tool in made.tools] == ["namespace", "namespace", "function"]
    call = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    said = [{**call, "name": "now", "namespace": "mcp__"}]
    result = [{"type": "function_call_output", "call_id": "c", "output": "5"}]
    create(calling, input=[{"role": "user", "content": "?"}, *said, *result], tools=spaces)
    assert 'invoke name="mcp__now"' in prompt_of(calling)


def test_a_choice_may_name_a_namespace_and_full_names_are_unequal(calling: Served):
    spaces = [{"type": "namespace", "name": "t", "description": "", "tools": TOOLS[:1]}]
    name = TOOLS[0]["name"]
    own = {**TOOLS[0], "name": f"t__{name}"}
    with pytest.raises(openai.BadRequestError, match=f"'t__{name}' is the full name of two"):
        create(calling, tools=[*spaces, own])
    chosen = {"type": "function", "namespace": "t", "name": name}
    for choice in (chosen, {"type": "allowed_tools", "mode": "auto", "tools": [chosen]}):
        create(calling, tools=[*spaces, TOOLS[1]], tool_choice=choice)
        prompt = prompt_of(calling)
        assert f'"name": "t__{name}"' in prompt
        assert f'"name": "{TOOLS[1]["name"]}"' not in prompt


def test_a_call_of_a_namespace_comes_back_under_both_names(calling: Served):
    space = {"type": "namespace", "name": "n_", "description": "", "tools": []}
    with pytest.raises(openai.BadRequestError, match="has no function"):
        create(calling, tools=[space])
    items = Items(namespaces_of([{**space, "tools": [{"type": "function", "name": "ow"}]}]))
    for event in (CallBegin(0, "n_ow"), CallEnd(0), CallBegin(1, "tide"), CallEnd(1)):
        items.take(event)
    first, second = items.ended
    assert (first["name"], first["namespace"]) == ("ow", "n_")
    assert (second["name"], "namespace" in second) == ("tide", False)


def test_a_refusal_is_what_the_assistant_said(plain: Served):
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    asked = {"role": "user", "content": "Why?"}
    create(plain, input=[said, asked])
    assert "assistant: I will not.\n" in prompt_of(plain)
    for turn in (said, {"role": "assistant", "content": None, "refusal": "I will not."}):
        talk = client(plain).chat.completions
        talk.create(model="test-model", messages=[turn, asked], max_tokens=5)
        assert "assistant: I will not.\n" in prompt_of(plain)
        wrong = {"role": "user", "content": said["content"]}
        with pytest.raises(openai.BadRequestError, match="refusal"):
            talk.create(model="test-model", messages=[wrong], max_tokens=5)


def test_forms_and_calls_become_grammars(calling: Served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    create(calling, text={"format": form})
    grammar = calling.engine.adds[-1].sampling.grammar
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    create(calling, tools=TOOLS, tool_choice={"type": "function", "name": "now"})
    of_now = calling.engine.adds[-1].sampling.grammar
    assert 'name=\\"now\\"' in of_now.text
    assert "tide" not in of_now.text
    listed = [{"type": "function", "name": "now"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": listed}
    create(calling, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert calling.engine.adds[-1].sampling.grammar == of_now


@pytest.mark.parametrize(
    ("changed", "param", "says"),
    [
        ({"prompt": {"id": "p"}}, "prompt", "no templates"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not kept"),
        ({"conversation": "c"}, "conversation", "not kept"),
        ({"background": True}, "background", "--keep-responses"),
        ({"truncation": "auto"}, "truncation", "truncate_prompt_tokens"),
        ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
        ({"max_output_tokens": 0}, "max_output_tokens", "is 0"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "is 9,999"),
        ({"input": []}, "input", "empty"),
        ({"input": "x " * 5000}, "input", "the prompt has"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "'input_image'",
        ),
        (
            {"input": [*THOUGHT, {"role": "king", "content": ""}]},
            "input",
            "input[3].role is 'king'",
        ),
        ({"input": [*THOUGHT, {"type": "function_call"}]}, "input", "input[3].name is null"),
        ({"input": [*THOUGHT, UNREAD]}, "input", "input[3].call_id is a number"),
        ({"tools": [SPACE, {"type": "function"}]}, "tools", "tools[1] must have a name"),
        ({"tools": [{"type": "web_search"}]}, "tools", "leave out web_search"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "'mcp'"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "1 to 128"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "y"}}, "tool_choice", "'y'"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "'grammar'"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "schema"),
        ({"extra_body": {"max_tokens": 4}}, "max_tokens", "max_output_tokens"),
        ({"extra_body": {"n": 2}}, "n", "one answer"),
    ],
)
def test_what_is_not_served_is_refused_by_name(calling: Served, changed, param, says):
    before = len(calling.engine.adds)
    with pytest.raises(openai.BadRequestError) as caught:
        create(calling, **changed)
    assert caught.value.param == param
    assert says in caught.value.message
    assert len(calling.engine.adds) == before


def test_usual_wishes_that_change_nothing_are_accepted(plain: Served):
    usual = {"store": True, "include": ["reasoning.encrypted_content"], "truncation": "disabled"}
    made = create(plain, **usual, metadata={"a": "b"}, user="u", reasoning={"summary": "auto"})
    assert made.metadata == {"a": "b"}
    assert made.store is False, "routers ask for it by themselves; the answer says what is so"


@pytest.mark.parametrize("said", ["When?", "When is it? " * 800], ids=["short", "read apart"])
def test_the_tokens_of_a_prompt_are_counted_as_a_response_counts_them(plain: Served, said: str):
    asked = {"input": [{"role": "user", "content": said}], "instructions": "Be brief."}
    counted = client(plain).responses.input_tokens.count(model="test-model", **asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == create(plain, **asked).usage.input_tokens
    adds = len(plain.engine.adds)
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not served"):
        client(plain).responses.input_tokens.count(input="x", previous_response_id="resp_1")
    assert len(plain.engine.adds) == adds, "nothing is made"


def prompt_after(served: Served, **asked: Any) -> str:
    create(served, **asked)
    return prompt_of(served)


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_a_template_s_keyword_overrides_the_effort(calling: Served, name: str):
    thinks, does_not = ({"chat_template_kwargs": {name: wish}} for wish in (True, False))
    high = {"reasoning": {"effort": "high"}}
    prompt = prompt_after(calling, extra_body=thinks)
    assert prompt == prompt_after(calling, **high)
    assert prompt != prompt_after(calling)
    assert prompt_after(calling, extra_body=does_not, **high) == prompt_after(calling)
    [first, *_] = create(calling, extra_body=thinks).output
    assert first.type == "reasoning"
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs has messages"):
        create(calling, extra_body={"chat_template_kwargs": {"messages": []}})
