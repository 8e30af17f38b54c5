"""Target `templates`: conversations through every chat style, replies through its parser.

    {"style": name, "thinking": bool, "messages": [...], "tools": [...], "reply": text,
     "cuts": [...], "source": a Jinja template, only for the style "jinja",
     "config": the tokenizer's configuration of a checkpoint, only for the style "folder"}

A conversation becomes a prompt or is refused in a sentence, and what it quotes has no mark in it.
What a reply says does not depend on how it was cut. A checkpoint's configuration names a style, or
is refused.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from ess.errors import BadInput
from ess.models.chat.messages import Conversation, read_messages, with_values
from ess.models.chat.quoting import Quoting
from ess.models.chat.replies import DOTS, GLM, HERMES, MISTRAL, hy
from ess.models.chat.reply import (
    CallArguments,
    Content,
    Event,
    Reasoning,
    ReplyParser,
    collect,
)
from ess.models.chat.styles import (
    ChatStyle,
    DeepSeekStyle,
    PlainStyle,
    TemplateStyle,
    style_of,
)
from ess.models.chat.template import ChatTemplate
from tests.fuzz import values
from tests.fuzz.fuzzer import Finding, Value
from tests.fuzz.lines import Lines, sources
from tests.fuzz.rig import SAYS, described
from tests.fuzz.shapes import LIKELY
from tests.server.harness import TOKENIZER

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<|assistant|>"
)
GLM_REPLY = (
    "thought</think>text<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>"
    "<arg_key>b</arg_key><arg_value>[1]</arg_value></tool_call>"
)
FURTHER_REPLIES = (
    '<think>t</think>x<tool_call>{"name": "f", "arguments": {"a": ["}"]}}</tool_call> y',
    '[THINK]t[/THINK]x[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]g[ARGS]{}</s>',
    '<dots_function_call><invoke name="f"><parameter name="a">x</parameter></invoke>'
    "</dots_function_call>",
    "t</think:x>y<tool_calls:x><tool_call:x>f<arg_key:x>a</arg_key:x><arg_value:x>1</arg_value:x>"
    "</tool_call:x></tool_calls:x>",
    't</think>x\n\n<\uff5cDSML\uff5ctool_calls><\uff5cDSML\uff5cinvoke name="f">'
    "</\uff5cDSML\uff5cinvoke></\uff5cDSML\uff5ctool_calls>",
)
MARKS = (
    *('{"name": "f", "arguments": ', "{", "}", '"', "\\", "[TOOL_CALLS]", "[ARGS]", "</s>"),
    *("[THINK]", "[/THINK]", "<dots_function_call>", "</dots_function_call>"),
    *('<invoke name="f">', "</invoke>", '<parameter name="a">', "</parameter>"),
    *("<tool_calls:x>", "</tool_calls:x>", "<tool_call:x>", "</tool_call:x>", "</think:x>"),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
    ),
    *(
        "</arg_value>",
        "<|user|>",
        "<|observation|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "\n\n",
    ),
    *(
        "<\uff5cDSML\uff5cfunction_calls>",
        "</\uff5cDSML\uff5cfunction_calls>",
        "<\uff5cDSML\uff5cinvoke",
    ),
    *(
        '<\uff5cDSML\uff5cinvoke name="f">',
        "</\uff5cDSML\uff5cinvoke>",
        "</\uff5cDSML\uff5cparameter>",
    ),
    '<\uff5cDSML\uff5cparameter name="a" string="true">',
    '<\uff5cDSML\uff5cparameter name="b" string="false">',
    *(
        "<",
        ">",
        '"',
        "{",
        "[1",
        "1",
        "NaN",
        "\\",
        "\u00e9",
        "\U0001f642",
        "x" * 600,
        " ",
        "\n",
        "\x00",
    ),
)
JINJA = (
    *(
        "{{ 7 * 7 }}",
        "{% for i in range(9) %}{{ i }}{% endfor %}",
        "{{ messages[0].content }}",
        "{{",
    ),
    *(
        "{% if tools %}t{% endif %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "}}",
    ),
    *(
        "{{ messages | tojson(indent=2) }}",
        "{% generation %}{{ bos_token }}{% endgeneration %}",
        "{% set n = namespace(a=1) %}",
        "{{ strftime_now('%Y') }}",
    ),
    *("{{ 'a' * 10000000000 }}", "{{ 9 ** 9 ** 9 }}", "{% for i in range(10**9) %}{% endfor %}"),
    *("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{% break %}", "{{ cycler }}", "{# a"),
    *(
        "{{ lipsum() }}",
        "{% include 'a' %}",
        "{% raw %}",
        "{{ joiner.__init__ }}",
        "\ud800",
        "\x00",
    ),
)
CONFIG = {
    "chat_template": [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "{{ tools }}{{ messages }}"},
    ],
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
}
CHAT_FILES = (
    *("models/chat/deepseek_v32.py", "models/chat/dsml.py"),
    *(f"models/chat/parsers/{name}.py" for name in ("deepseek_v32", "glm", "stream", "tagged")),
    *("models/chat/messages.py", "models/chat/quoting.py", "models/chat/reply.py"),
    *("models/chat/json_schemas.py", "models/chat/styles.py", "models/chat/template.py"),
    "models/text/marks.py",
)
QUOTED = frozenset(
    {"<think>", "<tool_call>", "<|user|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"}
)
FURTHER = {"hermes": HERMES, "mistral": MISTRAL, "dots": DOTS, "hy": hy(":x", ends_names=True)}
STYLES = ("deepseek", "deepseek_v4", "plain", "glm", "template", *FURTHER)


class Templates:
    name = "templates"

    def __init__(self) -> None:
        self.lines = Lines(sources(*CHAT_FILES))
        self._styles: dict[str, ChatStyle] = {}

    def __enter__(self) -> Templates:
        self._styles = {
            "deepseek": DeepSeekStyle(),
            "deepseek_v4": DeepSeekStyle.v4(),
            "plain": PlainStyle(),
            "glm": TemplateStyle(TEMPLATE, replies=GLM),
            "template": TemplateStyle(TEMPLATE),
            **{name: TemplateStyle(TEMPLATE, replies=replies) for name, replies in FURTHER.items()},
        }
        self.lines.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.lines.__exit__()
        for style in self._styles.values():
            if isinstance(style, TemplateStyle):
                style.close()

    def restart(self) -> None:
        """Nothing here outlives an input."""

    # ---- inputs

    def fresh(self, source: random.Random) -> Value:
        messages = source.choice(LIKELY["messages"])
        value = {
            "style": source.choice(STYLES),
            "thinking": source.random() < 0.5,
            "messages": messages if source.random() < 0.8 else values.value(source, 4),
            "tools": source.choice((None, LIKELY["tools"][0], values.value(source, 3))),
            "reply": _reply(source),
            "cuts": [source.randrange(1 << 16) for _ in range(source.randrange(12))],
        }
        if source.random() < 0.02:
            value |= {"style": "jinja", "source": "".join(source.choices(JINJA, k=3))}
        elif source.random() < 0.02:
            value |= {"style": "folder", "config": values.changed(source, CONFIG, CONFIG)}
        return value

    def changed(self, source: random.Random, value: Value, other: Value) -> Value:
        if "source" in value:
            value = _without_source(source, value)
        if "config" in value:
            return {**value, "config": values.changed(source, value["config"], CONFIG)}
        match source.randrange(4):
            case 0:
                reply = values.raw_changed(source, value["reply"], MARKS)[:5000]
                return {**value, "reply": reply.encode("utf-8", "ignore").decode()}
            case 1:
                return {**value, "cuts": [source.randrange(1 << 16) for _ in range(6)]}
            case 2:
                return {**value, "tools": values.changed(source, value["tools"], other["tools"])}
        messages = values.changed(source, value["messages"], other["messages"])
        return {**value, "messages": messages}

    # ---- running

    def run(self, value: Value) -> None:
        style = str(value["style"])
        if style not in (*STYLES, "jinja", "folder"):
            raise ValueError(f"no style {style!r}: the input was cut too far")
        try:
            self._encode(value)
            if style in self._styles:
                self._check_cuts(value)
        except Finding:
            raise
        except Exception as error:
            kind, place = described(error)
            raise Finding(kind, place, repr(error)[:500]) from error

    def _encode(self, value: Value) -> None:
        """As a chat request does, whose form the structs have checked: lists of objects."""
        try:
            written, tools = _quoted(value)
            messages = read_messages(written, tools=tools)
            if value["style"] == "jinja":
                _rendered(value["source"], value["messages"])
            elif value["style"] == "folder":
                _read(value["config"])
            else:
                style = self._styles[value["style"]]
                asked = Conversation(messages, thinking=value["thinking"])
                assert isinstance(style.encode(asked), str)
        except BadInput as error:
            if not str(error).strip():
                raise Finding("an error without words", str(value["style"]), repr(error)) from None

    def _check_cuts(self, value: Value) -> None:
        reply = value["reply"]
        cuts = sorted({cut % (len(reply) + 1) for cut in value["cuts"]})
        pieces = [
            reply[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(reply)], strict=True)
        ]
        whole = read(self._parser(value), [reply])
        parts = read(self._parser(value), pieces)
        if whole != parts:
            raise Finding("cuts matter", value["style"], f"{whole} and {parts} in {pieces}"[:1000])
        collect(whole)

    def _parser(self, value: Value) -> ReplyParser:
        tools = [tool["function"] for tool in LIKELY["tools"][0]]
        return self._styles[value["style"]].parser(thinking=value["thinking"], tools=tools)


def read(parser: ReplyParser, pieces: list[str]) -> list[Event]:
    """The events, neighbours of one kind joined."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(number, text)) if index == number:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(event)
    return joined


def _rendered(template: str, messages: Any) -> None:
    """A child of its own: it may be killed, and the deadline is short."""
    made = ChatTemplate(template, timeout_s=1.0)
    try:
        made.render({"messages": messages, "tools": None})
    finally:
        made.close()


def _read(config: Any) -> None:
    """The style of a checkpoint with this configuration, used as a server does."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        style = style_of(folder, TOKENIZER)
    try:
        style.thinks()
        assert not style.parser(thinking=False).finish()
    finally:
        if isinstance(style, TemplateStyle):
            style.close()


def _quoted(value: Value) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    written = with_values(_objects(value["messages"])), _objects(value["tools"])
    messages, tools = (Quoting(written, QUOTED).split(part) for part in written)
    text = json.dumps([messages, tools], ensure_ascii=False)
    assert not any(mark in text for mark in QUOTED), "a client wrote a mark"
    return messages, tools


def _objects(raw: Any) -> list[dict[str, Any]]:
    return [item for item in raw if isinstance(item, dict)] if isinstance(raw, list) else []


def _reply(source: random.Random) -> str:
    if source.random() < 0.4:
        return source.choice((*SAYS, GLM_REPLY, *FURTHER_REPLIES))
    return "".join(source.choices((*MARKS, "a", "text"), k=source.randrange(1, 12)))


def _without_source(source: random.Random, value: Value) -> Value:
    """A template of its own takes a process of its own: most inputs go back to a style."""
    if source.random() < 0.1:
        return {**value, "source": value["source"] + source.choice(JINJA)}
    kept = {name: item for name, item in value.items() if name != "source"}
    return {**kept, "style": source.choice(STYLES)}
