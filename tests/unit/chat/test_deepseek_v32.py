"""DeepSeek-V3.2's format, from its description: whole prompts and replies, literally."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.errors import BadInput
from ess.models.chat.deepseek_v32 import encode
from ess.models.chat.dsml import write_calls, write_tools
from ess.models.chat.messages import Reply, ToolCall, read_messages
from ess.models.chat.parsers.deepseek_v32 import DeepSeekParser
from ess.models.chat.reply import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    collect,
    parse,
)

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOL = {"type": "function", "function": {"name": "tide", "description": "Höhe", "parameters": {}}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": name, "arguments": text}}


def prompt(*messages: dict[str, Any], thinking: bool, reply: bool = True, tools: Any = ()) -> str:
    return encode(read_messages(messages, tools=tools), thinking=thinking, reply=reply)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def asked(arguments: str) -> dict[str, Any]:
    return said("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


def test_the_published_example() -> None:
    """The example of the model card: reasoning of an earlier turn is dropped."""
    messages = (
        user("hello"),
        said("Hello! I am DeepSeek.", reasoning_content="thinking..."),
        user("1+1=?"),
    )
    assert prompt(*messages, thinking=True) == (
        "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek."
        "<｜end▁of▁sentence｜><｜User｜>1+1=?<｜Assistant｜><think>"
    )
    assert prompt(*messages, thinking=False).endswith("1+1=?<｜Assistant｜></think>")


def test_the_tools_preamble_is_frozen() -> None:
    """The text that the model was trained on, up to the schemas; one changed byte fails."""
    written = write_tools([TOOL["function"]])  # type: ignore[list-item]
    preamble, _, rest = written.partition('{"name"')
    frozen = "963a72ee9be43f07d21bec2348ed2d7e45185e4b502f2a4da35a540299dc2b03"
    assert hashlib.sha256(preamble.encode()).hexdigest() == frozen
    assert rest == ': "tide", "description": "Höhe", "parameters": {}}\n</functions>\n'


def test_tools_follow_the_system_prompt() -> None:
    text = prompt(
        {"role": "system", "content": "Be brief."}, user("hi"), thinking=False, tools=[TOOL]
    )
    assert text.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\nYou have access")
    assert text.endswith("</functions>\n<｜User｜>hi<｜Assistant｜></think>")
    without = prompt(user("hi"), thinking=False, tools=[TOOL])
    assert without.startswith(f"{BEGIN}\n\n## Tools")


def test_a_conversation_with_tools() -> None:
    """Two parallel calls, their results as one block, reasoning kept across them."""
    messages = (
        user("Tide in Ulm and Cuxhaven?"),
        said(
            None,
            reasoning_content="Ask for both.",
            tool_calls=[call("tide", city="Ulm", days=2), call("tide", city='"Cux" & <b>')],
        ),
        result("none"),
        result('{"m": 3.1}'),
        said("Ulm has none.", reasoning_content="Ulm is inland."),
    )
    first = (
        "<｜User｜>Tide in Ulm and Cuxhaven?<｜Assistant｜><think>Ask for both.</think>\n\n"
        "<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="tide">\n'
        '<｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="tide">\n'
        '<｜DSML｜parameter name="city" string="true">"Cux" & <b></｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n"
        "<function_results>\n<result>none</result>\n"
        '<result>{"m": 3.1}</result>\n</function_results>\n\n<think>'
    )
    assert prompt(*messages[:4], thinking=True) == BEGIN + first
    whole = prompt(*messages, thinking=True, reply=False)
    assert whole == f"{BEGIN}{first}Ulm is inland.</think>Ulm has none.{END}"
    later = prompt(*messages, user("Thanks"), thinking=True)
    dropped = first.replace("<think>Ask for both.</think>", "</think>")
    dropped = dropped.removesuffix("<think>") + "</think>"
    assert later == f"{BEGIN}{dropped}Ulm has none.{END}<｜User｜>Thanks<｜Assistant｜><think>"
    assert prompt(*messages[:4], thinking=False) == BEGIN + dropped


def test_a_developer_turn() -> None:
    developer = {"role": "developer", "content": "Find it.", "tools": [TOOL]}
    schema = {"type": "object"}
    text = prompt({**developer, "response_format": schema}, thinking=True)
    assert text.startswith(f"{BEGIN}<｜User｜>\n\n## Tools\n\n")
    assert text.endswith(
        "</functions>\n\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema"
        ' to reply:\n{"type": "object"}\n\n# The user\'s message is: Find it.<｜Assistant｜><think>'
    )
    assert prompt(developer, said("a"), user("b"), thinking=True) == (
        f"{BEGIN}a{END}<｜User｜>b<｜Assistant｜><think>"
    )
    assert "Find it." in prompt(developer, said("a"), user("b"), thinking=False)


def test_a_response_format_of_the_system() -> None:
    system = {"role": "system", "content": "S", "response_format": {"a": 1}}
    assert prompt(system, user("u"), thinking=False).startswith(
        f"{BEGIN}S\n\n## Response Format:\n\nYou MUST strictly"
    )


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ([3], r"messages\[0\] is a number"),
        ([{"role": "robot"}], "'robot'"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is a number"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "expected text"),
        ([said("x")], "nothing to answer"),
        ([{"role": "developer"}], "no content"),
        ([result("x")], "1 tool results"),
        ([user("a"), result("x")], "made 0 calls"),
        ([user("a"), said("", tool_calls=[call("f"), call("g")]), result("x")], "made 2 calls"),
        ([user("a"), said("b", tool_calls=3)], "tool_calls is not a list"),
        ([user("a"), said("b", tool_calls=[{}])], "has no function"),
        (
            [user("a"), said("b", tool_calls=[{"type": "custom", "custom": {"name": "f"}}])],
            r"messages\[1\].tool_calls\[0\].type is 'custom'; only function is served",
        ),
        (
            [{"role": "developer", "tools": [{"type": "custom", "custom": {"name": "f"}}]}],
            r"messages\[0\].tools\[0\].type is 'custom'; only function is served",
        ),
        (
            [user("a"), said("", tool_calls=[call("f")]), result("r"), said("b")],
            "nothing to answer",
        ),
        ([user("a"), asked("[1"), result("r")], "not JSON"),
        ([user("a"), asked("[1]"), result("r")], "not a JSON object"),
    ],
)
def test_bad_conversations_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        prompt(*messages, thinking=True)


def test_reasoning_is_demanded_after_the_last_user() -> None:
    with pytest.raises(BadInput, match="with neither reasoning nor calls"):
        prompt(user("a"), said("b"), thinking=True, reply=False)


def test_a_refusal_counts_messages_as_the_request_has_them() -> None:
    """Behind a message that was made for tools, and one left out."""
    developer = {"role": "developer", "content": "D"}
    given = [user("a"), said("b"), developer, user("c"), said("d", reasoning_content="r")]
    with pytest.raises(BadInput, match=r"messages\[5\] begins 1 tool results"):
        encode(read_messages([*given, result("x")], tools=[TOOL]), thinking=True)


def test_contents_of_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<｜User｜>ab<" in prompt({"role": "user", "content": parts}, thinking=False)


# Replies.

CALLS = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="tide">\n'
    '<｜DSML｜parameter name="city" string="true">Bad "Ulm"\nÄ</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
BOTH = (
    ToolCall(name="tide", arguments='{"city": "Bad \\"Ulm\\"\\nÄ", "days": [1, {"a": null}]}'),
    ToolCall(name="now", arguments="{}"),
)


@pytest.mark.parametrize("end", ["", END, END + "surplus"])
@pytest.mark.parametrize(
    ("thinking", "text", "reply"),
    [
        (False, "Hello.", Reply(content="Hello.")),
        (True, "Hm.</think>Hello.", Reply(reasoning="Hm.", content="Hello.")),
        (True, "never ends", Reply(reasoning="never ends")),
        (True, "</think>", Reply()),
        (False, CALLS, Reply(tool_calls=BOTH)),
        (True, f"R</think>C{CALLS}", Reply(reasoning="R", content="C", tool_calls=BOTH)),
        (True, f"R{CALLS}", Reply(reasoning="R", tool_calls=BOTH)),
        (False, CALLS.strip(), Reply(tool_calls=BOTH)),
        (False, "a\n\nb\n\n<｜DSML｜not a call", Reply(content="a\n\nb\n\n<｜DSML｜not a call")),
    ],
)
def test_replies(thinking: bool, text: str, reply: Reply, end: str) -> None:
    assert parse(DeepSeekParser(thinking=thinking), text + end) == reply


def merged(events: list[Event]) -> list[Event]:
    """Neighbours of one kind joined: what a reader of the stream sees."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content | Reasoning) and type(last) is type(event):
            joined[-1] = type(event)(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


FRAGMENTS = (
    *("<｜DSML｜function_calls>", "\n", "\n\n", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>"),
    *('<｜DSML｜parameter name="k" string="true">', '<｜DSML｜parameter name="n" string="false">'),
    *("</｜DSML｜parameter>", "</｜DSML｜function_calls>", "</think>", END, "<", "｜DSML｜", " "),
    *("text", "12", '"', "\\", "é", "[1", '<｜DSML｜invoke name="a>b">', "</", CALLS),
)


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    seed=st.integers(0, 2**32),
    thinking=st.booleans(),
)
def test_any_text_in_any_pieces_gives_the_same(text: str, seed: int, thinking: bool) -> None:
    """And never an exception; calls that end have arguments that are a JSON object."""
    whole = DeepSeekParser(thinking=thinking)
    want = merged([*whole.push(text), *whole.finish()])
    rng, stream, events = random.Random(seed), DeepSeekParser(thinking=thinking), list[Event]()
    at = 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 5, 40))
        events += stream.push(text[at : at + size])
        at += size
    events += stream.finish()
    assert merged(events) == want
    for call in collect(events).tool_calls:
        assert isinstance(json.loads(call.arguments), dict)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(arguments=st.dictionaries(st.sampled_from(["a", "b", "city"]), JSON_VALUES, max_size=3))
def test_a_written_call_reads_back(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    written = write_calls([ToolCall(name="f", arguments=text)])
    (call,) = parse(DeepSeekParser(thinking=False), f"\n\n{written}{END}").tool_calls
    assert json.loads(call.arguments) == arguments


def test_a_string_streams_before_it_ends() -> None:
    parser = DeepSeekParser(thinking=False)
    begun = CALLS[: CALLS.index("Ulm")]
    events = parser.push(begun)
    assert events[0] == CallBegin(0, "tide")
    assert "".join(e.text for e in events[1:] if isinstance(e, CallArguments)) == (
        '{"city": "Bad \\"'
    )
    assert CallEnd(0) in parser.push(CALLS[len(begun) :])


@pytest.mark.parametrize(
    ("text", "content", "flaw"),
    [
        ("\n\n<｜DSML｜function_calls>\nwords", "words", "lacks"),
        (CALLS.replace('name="tide"', "name=tide"), "<｜DSML｜invoke name=tide>", "lacks"),
        (CALLS[: CALLS.index("Ulm")], "", "ends inside a tool call"),
        (f"{CALLS}more", "more", "lacks"),
    ],
)
def test_broken_markup_is_a_flaw_and_no_error(text: str, content: str, flaw: str) -> None:
    reply = parse(DeepSeekParser(thinking=False), text)
    assert reply.flaw is not None
    assert flaw in reply.flaw
    assert reply.content.startswith(content)


def test_a_value_that_is_no_json_becomes_a_string() -> None:
    text = CALLS.replace('[1, {"a": null}]', "soon")
    (first, _) = parse(DeepSeekParser(thinking=False), text).tool_calls
    assert json.loads(first.arguments)["days"] == "soon"
