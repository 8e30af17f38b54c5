from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.models.chat.messages import Reply, ToolCall
from ess.models.chat.parsers.glm import GlmParser
from ess.models.chat.reply import CallArguments, Content, Event, collect, parse

TOOLS = (
    {
        "name": "tide",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
    {"name": "now"},
)
CALL = (
    '<tool_call>tide\n<arg_key>city</arg_key>\n<arg_value>4711 "Ä"</arg_value>\n'
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
TIDE = ToolCall(name="tide", arguments='{"city": "4711 \\"Ä\\"", "days": 3}')
NOW = ToolCall(name="now", arguments="{}")


@pytest.mark.parametrize(
    ("thinking", "text", "reply"),
    [
        (False, "Hello.", Reply(content="Hello.")),
        (True, "Hm.</think>Hello.", Reply(reasoning="Hm.", content="Hello.")),
        (True, f"R</think>C{CALL}", Reply(reasoning="R", content="C", tool_calls=(TIDE,))),
        (False, f"{CALL}\n<tool_call>now</tool_call>\n", Reply(tool_calls=(TIDE, NOW))),
        (False, f"{CALL}<|observation|>x", Reply(content="", tool_calls=(TIDE,))),
        (False, f"{CALL} after", Reply(content="after", tool_calls=(TIDE,))),
        (False, f"{CALL}<tool", Reply(content="<tool", tool_calls=(TIDE,))),
        (False, "a<|user|>b", Reply(content="a")),
    ],
)
def test_replies(thinking: bool, text: str, reply: Reply) -> None:
    assert parse(GlmParser(thinking=thinking, tools=TOOLS), text) == reply


def test_without_a_schema_a_value_is_what_it_reads_as() -> None:
    text = CALL.replace('4711 "Ä"', "4711").replace(">3<", ">soon<")
    (call,) = parse(GlmParser(thinking=False), text).tool_calls
    assert json.loads(call.arguments) == {"city": 4711, "days": "soon"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>tide words",
        "<tool_call>tide<arg_key>city</arg_key>Ulm</tool_call>",
        "<tool_call>tide<arg_key>city",
        f"<tool_call>{'x' * 600}</tool_call>",
        CALL[:-20],
    ],
)
def test_broken_markup_is_a_flaw_and_no_error(text: str) -> None:
    reply = parse(GlmParser(thinking=False, tools=TOOLS), text)
    assert reply.flaw is not None
    assert reply.tool_calls == ()


FRAGMENTS = (
    *("<tool_call>", "tide", "<arg_key>", "city", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("</tool_call>", "</think>", "<", "\n", "x" * 300, '"', "12", "<|user|>", "days", CALL),
)


def shown(events: list[Event]) -> tuple[Reply, list[str]]:
    parts = [e.text for e in events if isinstance(e, CallArguments | Content)]
    return collect(events), ["".join(parts)]


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    seed=st.integers(0, 2**32),
    thinking=st.booleans(),
)
def test_any_text_in_any_pieces_gives_the_same(text: str, seed: int, thinking: bool) -> None:
    whole = GlmParser(thinking=thinking, tools=TOOLS)
    want = shown([*whole.push(text), *whole.finish()])
    rng, stream, events = random.Random(seed), GlmParser(thinking=thinking, tools=TOOLS), []
    at = 0
    while at < len(text):
        size = rng.choice((1, 1, 3, 9, 200))
        events += stream.push(text[at : at + size])
        at += size
    events += stream.finish()
    assert shown(events) == want
    for call in want[0].tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
