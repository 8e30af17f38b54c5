"""The chat format of a checkpoint: how its prompts are written and its replies read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from ess.errors import BadInput
from ess.models.chat import deepseek_v4, deepseek_v32, dsml
from ess.models.chat.grammars import dsml as dsml_grammar
from ess.models.chat.grammars.calls import Calls
from ess.models.chat.messages import Conversation, Message, arguments_of, json_kind
from ess.models.chat.parsers.deepseek_v32 import DeepSeekParser
from ess.models.chat.replies import PLAIN, Replies, replies_of
from ess.models.chat.reply import PlainParser, ReplyParser
from ess.models.chat.template import SOURCE_BYTES_MAX, ChatTemplate
from ess.models.weights.files.folder import Folder

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer

TEMPLATE_FILE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
TOOL_FILE: Final = "tool_use.jinja"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
CONFIG_FILE: Final = "config.json"
# What templates may ask for by name, as in transformers.
MARKS: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

Tools = Sequence[Mapping[str, Any]]


class ChatStyle(Protocol):
    """`stops` are strings at which a reply ends, beside the model's own end token; `waits` says
    that `encode` waits for another process, `without_tools` why prompts show no tools, if so."""

    stops: tuple[str, ...]
    waits: bool
    without_tools: str

    def encode(self, asked: Conversation) -> str:
        """The prompt."""
        ...

    def thinks(self) -> bool:
        """Whether the model thinks before it answers where a request does not say so."""
        ...

    def call_grammar(self, tokenizer: Tokenizer, calls: Calls) -> str | None:
        """Lark text; None where it is not known how the model writes calls."""
        ...

    def parser(self, *, thinking: bool, tools: Tools = ()) -> ReplyParser: ...


class DeepSeekStyle:
    """`write` writes prompts, in other words for other efforts if it `knows_effort`; `opening` and
    `closing` are around a block of calls."""

    stops: tuple[str, ...] = (dsml.END,)
    waits = False
    without_tools = ""

    def __init__(
        self,
        write: Callable[..., str] = deepseek_v32.encode,
        *,
        opening: str = dsml.CALLS,
        closing: str = dsml.CALLS_END,
        knows_effort: bool = False,
    ) -> None:
        self._write = write
        self._knows_effort = knows_effort
        self._marks = {"opening": opening, "closing": closing}

    @classmethod
    def v4(cls) -> DeepSeekStyle:
        marks = {"opening": dsml.CALLS_V4, "closing": dsml.CALLS_V4_END}
        return cls(deepseek_v4.encode, knows_effort=True, **marks)

    def encode(self, asked: Conversation) -> str:
        more = {"effort": asked.names.get("reasoning_effort")} if self._knows_effort else {}
        thinking = bool(asked.thinking)
        text = self._write(asked.messages, thinking=thinking, reply=not asked.goes_on, **more)
        return text.removesuffix(dsml.END) if asked.goes_on else text

    def thinks(self) -> bool:
        """As vLLM and SGLang have it for DeepSeek's own formats."""
        return False

    def call_grammar(self, tokenizer: Tokenizer, calls: Calls) -> str | None:
        return dsml_grammar.write(tokenizer, calls, **self._marks)

    def parser(self, *, thinking: bool, tools: Tools = ()) -> ReplyParser:
        return DeepSeekParser(thinking=thinking, **self._marks)


class PlainStyle:
    """For models without a format of their own: a line per turn."""

    stops: tuple[str, ...] = ("\nuser:",)
    waits = False
    without_tools = "the model has no chat template"

    def encode(self, asked: Conversation) -> str:
        if any(message.tools or message.tool_calls for message in asked.messages):
            raise BadInput("this model knows no tools")
        turns = "".join(f"{m.role}: {m.content}\n" for m in asked.messages)
        return turns.removesuffix("\n") if asked.goes_on else turns + "assistant:"

    def thinks(self) -> bool:
        return False

    def call_grammar(self, tokenizer: Tokenizer, calls: Calls) -> str | None:
        return None

    def parser(self, *, thinking: bool, tools: Tools = ()) -> ReplyParser:
        return PlainParser()


class TemplateStyle:
    """A checkpoint's own Jinja template, and how its replies are marked up, if at all. `marks` are
    the checkpoint's own, by the names that templates have for them. `tool_source`, if any, is the
    template for conversations with tools."""

    stops: tuple[str, ...] = ()
    waits = True

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        replies: Replies = PLAIN,
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._template = ChatTemplate(source)
        self._tool_template = ChatTemplate(tool_source) if tool_source else self._template
        self._marks = marks
        self.replies = replies
        self._thinks: bool | None = None
        has_tools = "tools" in (tool_source or source)
        self.without_tools = "" if has_tools else "the model's chat template never reads `tools`"

    def encode(self, asked: Conversation) -> str:
        messages = asked.messages
        last = messages[-1].content.rstrip() if asked.goes_on else ""
        tools = [{"type": "function", "function": dict(t)} for m in messages for t in m.tools]
        template = self._tool_template if tools else self._template
        text = template.render(
            {
                **self._marks,
                **asked.names,
                "messages": [_as_openai(message) for message in messages],
                "tools": tools or None,
                "add_generation_prompt": not asked.goes_on,
                **self._told_of_thinking(asked),
            }
        )
        if last not in text:
            raise BadInput("continue_final_message is not served: the template changes the message")
        return text[: text.rindex(last) + len(last)] if asked.goes_on else text

    def _told_of_thinking(self, asked: Conversation) -> dict[str, Any]:
        if asked.thinking is None:
            return {}
        effort = asked.names.get("reasoning_effort")
        switches = {"enable_thinking": asked.thinking, "thinking": asked.thinking}
        return {**switches, **self.replies.names(asked.thinking, effort)}

    def thinks(self) -> bool:
        """By three prompts: one with thinking, one without, and one whose template is not told. A
        template that needs more than a question does not think."""
        if self._thinks is None:
            question = [Message(role="user", content="Hi")]
            try:
                loud, quiet, untold = (
                    self.encode(Conversation(question, thinking=wish))
                    for wish in (True, False, None)
                )
                self._thinks = untold == loud != quiet
            except BadInput:
                self._thinks = False
        return self._thinks

    def call_grammar(self, tokenizer: Tokenizer, calls: Calls) -> str | None:
        write = self.replies.grammar
        return None if write is None else write(tokenizer, calls)

    def parser(self, *, thinking: bool, tools: Tools = ()) -> ReplyParser:
        return self.replies.parser(thinking, tools)

    def close(self) -> None:
        self._template.close()
        self._tool_template.close()


def style_of(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    template: str | None = None,
) -> ChatStyle:
    """DeepSeek's if the vocabulary has its marks, else the folder's template, else plain; a
    template that is given comes before all of these."""
    is_deepseek = all(tokenizer.id_of(mark) is not None for mark in (dsml.USER, dsml.ASSISTANT))
    folder = Folder(path)
    try:
        if template is None and is_deepseek:
            is_v4 = folder.read_json_or_empty(CONFIG_FILE).get("model_type") == "deepseek_v4"
            return DeepSeekStyle.v4() if is_v4 else DeepSeekStyle()
        known = folder.read_json_or_empty(TOKENIZER_CONFIG_FILE)
        source, with_tools = (template, None) if template is not None else _sources(folder, known)
    finally:
        folder.close()
    if source is None:
        return PlainStyle()
    replies = replies_of(tokenizer, source + (with_tools or ""))
    return TemplateStyle(source, tool_source=with_tools, replies=replies, marks=_marks(known))


def _sources(folder: Folder, known: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template, and another for conversations with tools, if there is one. `known` is the
    tokenizer's configuration."""
    if TEMPLATE_FILE in folder.names():
        return _source(folder, TEMPLATE_FILE), _tool_source(folder)
    source = known.get("chat_template")
    if isinstance(source, list):
        return _named_sources(source)
    if source is not None and not isinstance(source, str):
        raise BadInput(f"{TOKENIZER_CONFIG_FILE}: chat_template is {json_kind(source)}")
    return source, None


def _source(folder: Folder, name: str) -> str:
    try:
        return folder.read(name, bytes_max=SOURCE_BYTES_MAX).decode("utf-8")
    except UnicodeError as error:
        raise BadInput(f"{name} is not UTF-8: {error}") from None


def _tool_source(folder: Folder) -> str | None:
    """Beside the template transformers writes others into a folder, each under its name."""
    if MORE_TEMPLATES not in folder.names():
        return None
    inner = folder.inner(MORE_TEMPLATES)
    try:
        return _source(inner, TOOL_FILE) if TOOL_FILE in inner.names() else None
    finally:
        inner.close()


def _named_sources(listed: Sequence[Any]) -> tuple[str, str | None]:
    """Of templates with names, those that transformers takes: `tool_use` where a conversation has
    tools, `default` elsewhere."""
    where = f"{TOKENIZER_CONFIG_FILE}: chat_template"
    sources: dict[str, str] = {}
    for place, each in enumerate(listed):
        match each:
            case {"name": str(name), "template": str(source)}:
                sources[name] = source
            case _:
                raise BadInput(f"{where}[{place}] must be an object with a name and a template")
    if "default" not in sources:
        has = ", ".join(map(repr, sorted(sources))) or "no templates"
        raise BadInput(f"{where} has {has:.200}, but none with the name 'default'")
    return sources["default"], sources.get("tool_use")


def _marks(known: Mapping[str, Any]) -> dict[str, str]:
    """A mark is a text, or an object with its text and how it is recognised."""
    marks = {}
    for name in MARKS:
        mark = known.get(name)
        text = mark.get("content") if isinstance(mark, Mapping) else mark
        if isinstance(text, str):
            marks[name] = text
    return marks


def _as_openai(message: Message) -> Mapping[str, Any]:
    """The form that templates expect: arguments as an object."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.call_id is not None:
        turn["tool_call_id"] = message.call_id
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                **({} if call.id is None else {"id": call.id}),
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
            }
            for call in message.tool_calls
        ]
    return turn
