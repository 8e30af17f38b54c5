"""The formats of further families: a checkpoint is recognised, prompts rendered, replies parsed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ess.errors import BadInput
from ess.models.chat import deepseek_v4
from ess.models.chat.messages import Conversation, Reply, ToolCall, read_messages
from ess.models.chat.reply import collect, parse
from ess.models.chat.styles import ChatStyle, DeepSeekStyle, TemplateStyle, style_of
from ess.models.text.tokenizer import Tokenizer

TOOLS = (
    {
        "name": "tide",
        "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
    {"name": "now"},
)
TIDE = ToolCall(name="tide", arguments='{"city": "4711 \\"Ä\\"", "days": 3}')
NOW = ToolCall(name="now", arguments="{}")
BOTH = Reply(reasoning="Hm.", content="So.", tool_calls=(TIDE, NOW))

# As short as a template can be that renders in the manner of the family's own.
HY = """{%- for m in messages %}<|hy_start:x|>{{ m.role }}<|hy_middle:x|>{{ m.content }}<|hy_end:x|>
{%- endfor %}<|reasoning_mode:x|>{{ reasoning_effort }}"""
AXK2 = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endfor %}{#- <tool_call> -#}
{{ '<think>' if thinking else '</think>' }}"""
DOTS = """{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
<|assistant|>{{ '' if enable_thinking else '<think></think>' }}{#- <dots_function_call> -#}"""
MISTRAL = """{%- for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"""

HY_MARKS = [
    f"<{end}{word}:x>" for word in ("think", "tool_calls", "tool_call") for end in ("", "/")
]
HY_MARKS += [f"<{end}arg_{word}:x>" for word in ("key", "value") for end in ("", "/")]
FAMILIES: dict[str, dict[str, Any]] = {
    "A.X-K2": {
        "template": AXK2,
        "marks": [],
        "prompt": "<|im_start|>user\nHi<|im_end|><think>",
        "quiet": "</think>",
        "reply": 'Hm.</think>So.<tool_call>\n{"name": "tide", "arguments": {"city": "4711 \\"Ä\\"",'
        ' "days": 3}}\n</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    },
    "Hy4": {
        "template": HY,
        "marks": HY_MARKS,
        "prompt": "<|hy_start:x|>user<|hy_middle:x|>Hi<|hy_end:x|><|reasoning_mode:x|>high",
        "quiet": "no_think",
        "reply": "Hm.</think:x>So.<tool_calls:x>\n<tool_call:x>tide<arg_key:x>city</arg_key:x>"
        '<arg_value:x>4711 "Ä"</arg_value:x><arg_key:x>days</arg_key:x>'
        "<arg_value:x>3</arg_value:x></tool_call:x>\n<tool_call:x>now</tool_call:x></tool_calls:x>",
    },
    "Hy4, where a mark ends names": {
        "template": HY,
        "marks": [*HY_MARKS, "<tool_sep:x>"],
        "prompt": "<|hy_start:x|>user<|hy_middle:x|>Hi<|hy_end:x|><|reasoning_mode:x|>high",
        "quiet": "no_think",
        "reply": "Hm.</think:x>So.<tool_calls:x>\n<tool_call:x>tide<tool_sep:x>\n"
        '<arg_key:x>city</arg_key:x>\n<arg_value:x>4711 "Ä"</arg_value:x>\n'
        "<arg_key:x>days</arg_key:x>\n<arg_value:x>3</arg_value:x>\n</tool_call:x>\n"
        "<tool_call:x>now<tool_sep:x>\n</tool_call:x>\n</tool_calls:x>",
    },
    "dots3": {
        "template": DOTS,
        "marks": [],
        "prompt": "<|user|>Hi<|end|><|assistant|>",
        "quiet": "<think></think>",
        "reply": '<think>Hm.</think>So.<dots_function_call>\n<invoke name="tide">\n'
        '<parameter name="city">4711 "Ä"</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</dots_function_call>',
    },
    "Mistral-Large-4": {
        "template": MISTRAL,
        "marks": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
        "prompt": "[INST]Hi[/INST]",
        "quiet": "[/INST]",
        "reply": '[THINK]Hm.[/THINK]So.[TOOL_CALLS]tide[ARGS]{"city": "4711 \\"Ä\\"", "days": 3}'
        "[TOOL_CALLS]now[ARGS]{}</s>",
    },
    "DeepSeek-V4": {
        "template": None,
        "marks": ["<｜User｜>", "<｜Assistant｜>"],
        "prompt": "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>",
        "quiet": "</think>",
        "reply": 'Hm.</think>So.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="tide">\n'
        '<｜DSML｜parameter name="city" string="true">4711 "Ä"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls><｜end▁of▁sentence｜>",
    },
}


def style(folder: Path, family: str) -> ChatStyle:
    """As it is found in a folder of the family."""
    known = FAMILIES[family]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(known["marks"])
    library.save(str(folder / "tokenizer.json"))
    if known["template"] is not None:
        (folder / "chat_template.jinja").write_text(known["template"])
    kind = "deepseek_v4" if known["template"] is None else "other"
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return style_of(folder, Tokenizer(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_recognised_rendered_and_read(family: str, tmp_path: Path) -> None:
    known, chat = FAMILIES[family], style(tmp_path, family)
    messages = read_messages([{"role": "user", "content": "Hi"}])
    assert chat.encode(Conversation(messages, thinking=True)) == known["prompt"]
    assert chat.encode(Conversation(messages, thinking=False)).endswith(known["quiet"])
    assert parse(chat.parser(thinking=True, tools=TOOLS), known["reply"]) == BOTH
    assert parse(chat.parser(thinking=False), "So.") == Reply(content="So.")
    if isinstance(chat, TemplateStyle):
        chat.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_do_not_matter_and_broken_markup_is_a_flaw(family: str, tmp_path: Path) -> None:
    """However a reply is cut, and wherever it ends; what is wrong in it never raises."""
    chat, chance = style(tmp_path, family), random.Random(family)
    for _ in range(60):
        text = FAMILIES[family]["reply"]
        if chance.random() < 0.7:
            begin = chance.randrange(len(text))
            text = text[:begin] + chance.choice(["", "x", "}", '"', "<"]) + text[begin + 1 :]
        text = text[: chance.randrange(1, len(text) + 1)]
        whole = parse(chat.parser(thinking=True, tools=TOOLS), text)
        parser, events, at = chat.parser(thinking=True, tools=TOOLS), list[Any](), 0
        while at < len(text):
            step = chance.randrange(1, 9)
            events += parser.push(text[at : at + step])
            at += step
        assert collect([*events, *parser.finish()]) == whole
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("family", "reply", "calls", "content"),
    [
        ("A.X-K2", "<tool_call>{oops</tool_call> a", 0, "{oops</tool_call> a"),
        ("A.X-K2", '<tool_call>{"name": 3}</tool_call>', 0, '{"name": 3}</tool_call>'),
        (
            "A.X-K2",
            '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>"}}</tool_call>',
            1,
            "",
        ),
        ("A.X-K2", '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>b', 0, None),
        ("Mistral-Large-4", "[TOOL_CALLS]now[ARGS]{}after", 1, "after"),
        ("Mistral-Large-4", "[TOOL_CALLS]now[ARGS]nothing", 0, "nothing"),
        ("Mistral-Large-4", '[TOOL_CALLS]now[ARGS]{"a": {"b": "}"}}', 1, ""),
        ("Mistral-Large-4", "[TOOL_CALLS]now", 0, ""),
        ("Hy4", "<tool_calls:x>oops", 0, "oops"),
        ("dots3", "<dots_function_call>oops", 0, "oops"),
        ("DeepSeek-V4", "<｜DSML｜tool_calls>oops", 0, "oops"),
    ],
)
def test_markup_that_cannot_be_read(
    family: str, reply: str, calls: int, content: str | None, tmp_path: Path
) -> None:
    reply_read = parse(style(tmp_path, family).parser(thinking=False, tools=TOOLS), reply)
    assert len(reply_read.tool_calls) == calls
    assert content is None or reply_read.content == content
    assert (reply_read.flaw is None) == bool(calls)


# ---- DeepSeek-V4, from its published description


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def v4(*messages: dict[str, Any], thinking: bool = True, tools: Any = ()) -> str:
    return deepseek_v4.encode(read_messages(messages, tools=tools), thinking=thinking)


CALL = said(
    "",
    reasoning_content="Look.",
    tool_calls=[{"function": {"name": "tide", "arguments": '{"city": "Ulm"}'}}],
)
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {}}}


def test_v4_drops_earlier_reasoning_without_tools() -> None:
    text = v4(user("a"), said("b", reasoning_content="r"), user("c"))
    assert text == (
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜>"
        "<｜User｜>c<｜Assistant｜><think>"
    )


def test_v4_keeps_all_reasoning_where_tools_are_shown() -> None:
    results = [{"role": "tool", "content": "3 m"}, user("And now?")]
    text = v4(user("a"), CALL, *results, tools=[TOOL])
    head, _, tail = text.partition("<｜User｜>")
    assert head.startswith(
        "<｜begin▁of▁sentence｜>\n\n## Tools\n\nYou have access to a set of tools to"
    )
    assert head.endswith("schemas to invoke tool calls.\n")
    assert '\n\n{"name": "tide", "parameters": {}}\n\n' in head
    assert tail == (
        "a<｜Assistant｜><think>Look.</think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="tide">\n'
        '<｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜>"
        "<tool_result>3 m</tool_result>\n\nAnd now?"
        "<｜Assistant｜><think>"
    )


def test_v4_is_refused_where_nothing_is_to_be_answered() -> None:
    with pytest.raises(BadInput, match="the last message is the assistant's"):
        v4(user("a"), said("b"))
    with pytest.raises(BadInput, match="begins 1 tool results"):
        v4(user("a"), {"role": "tool", "content": "x"})
    with pytest.raises(BadInput, match=r"messages\[0\] is a developer's and has no"):
        v4({"role": "developer", "content": ""})


def test_v4_goes_on_where_the_assistant_stopped() -> None:
    messages = read_messages([user("a"), said("b and")])
    text = DeepSeekStyle.v4().encode(Conversation(messages, thinking=False, goes_on=True))
    assert text.endswith("<｜User｜>a<｜Assistant｜></think>b and")


def test_v4_drops_developers_before_the_last_question_only_while_it_thinks() -> None:
    messages = {"role": "developer", "content": "d"}, said("b"), user("c")
    assert "<｜User｜>d" not in v4(*messages)
    assert "<｜User｜>d<｜Assistant｜></think>b" in v4(*messages, thinking=False)


def test_v4_orders_results_by_their_calls() -> None:
    calls = [{"id": name, "function": {"name": "tide", "arguments": "{}"}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "cab"]
    text = v4(user("u"), said("", reasoning_content="r", tool_calls=calls), *results)
    assert [text.index(f"<tool_result>{name}<") for name in "abc"] == sorted(
        text.index(f"<tool_result>{name}<") for name in "abc"
    )
    unnamed = [{"role": "tool", "content": name} for name in "cab"]
    text = v4(user("u"), said("", reasoning_content="r", tool_calls=calls), *unnamed)
    assert text.index("<tool_result>c<") < text.index("<tool_result>a<")


@pytest.mark.parametrize(
    ("effort", "thinking", "begins"),
    [
        ("max", True, "Reasoning Effort: Beyond maximum — exhaustive"),
        ("high", True, "Reasoning Effort: Absolute maximum with"),
        ("xhigh", True, "Reasoning Effort: Absolute maximum with"),
        *((effort, True, "<｜User｜>u") for effort in ("medium", "low", "minimal", None, ["max"])),
        ("max", False, "<｜User｜>u"),
    ],
)
def test_v4_asks_for_much_and_for_the_most_reasoning(
    effort: object, thinking: bool, begins: str
) -> None:
    names = {"reasoning_effort": effort}
    asked = Conversation(read_messages([user("u")]), thinking=thinking, names=names)
    text = DeepSeekStyle.v4().encode(asked)
    assert text.startswith(f"<｜begin▁of▁sentence｜>{begins}")
    assert text.endswith("\n\n<｜User｜>u<｜Assistant｜><think>") == ("Effort" in begins)


def test_a_template_gets_the_ids_of_calls() -> None:
    source = (
        "{%- for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}"
        "{{ m.tool_call_id }};{% endfor %}"
    )
    call = {"id": "c1", "function": {"name": "tide", "arguments": "{}"}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    template = TemplateStyle(source)
    messages = read_messages([user("u"), said("", tool_calls=[call]), answer])
    try:
        assert template.encode(Conversation(messages, thinking=False)) == ";c1;c1;"
    finally:
        template.close()


@pytest.mark.parametrize(
    ("effort", "thinking", "written"),
    [
        ("low", True, "low"),
        ("minimal", True, "low"),
        ("high", True, "high"),
        ("max", True, "high"),
        (None, True, "high"),
        ("none", False, "no_think"),
        ("low", False, "no_think"),
    ],
)
def test_hy_knows_three_efforts(
    effort: str | None, thinking: bool, written: str, tmp_path: Path
) -> None:
    chat, names = style(tmp_path, "Hy4"), {} if effort is None else {"reasoning_effort": effort}
    asked = Conversation(read_messages([user("u")]), thinking=thinking, names=names)
    assert chat.encode(asked).endswith(f"<|reasoning_mode:x|>{written}")
    assert isinstance(chat, TemplateStyle)
    chat.close()
