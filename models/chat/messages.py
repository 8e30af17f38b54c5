"""Messages of a conversation, checked once, from the OpenAI form that clients send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, Literal, cast

from ess.errors import BadInput

Role = Literal["system", "developer", "user", "assistant", "tool"]
TEXT_PARTS: Final = ("text", "input_text", "output_text")
REFUSAL: Final = "refusal"
ROLES: Final = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made; `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    """Of a tool's result: the call that it answers, if the client says so."""
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: Mapping[str, Any] | None = None
    place: str = field(default="", compare=False)
    """Where the request has it, for refusals."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is written from: the prompt of a reply, or of the rest of the last message,
    which `goes_on`. A template also gets `names`, and no word on thinking if `thinking` is None; of
    the other formats, DeepSeek-V4's reads `reasoning_effort`."""

    messages: Sequence[Message]
    _: KW_ONLY
    thinking: bool | None
    goes_on: bool = False
    names: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.goes_on:
            return
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.content.strip():
            raise BadInput(
                f"{last.place} is to be continued, as with continue_final_message: it must be an"
                " assistant's, with content and without calls"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said. `flaw` says what was wrong with its markup, if anything was."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    flaw: str | None = None


def read_messages(
    raw: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    places: Sequence[str] | None = None,
) -> list[Message]:
    """Messages from a chat request. The request's tools go to the leading system message, which is
    made, empty, if there is none. `places` are those where the client has the messages."""
    places = places_of(raw) if places is None else places
    messages = [_message(where, item) for where, item in zip(places, raw, strict=True)]
    if not messages:
        raise BadInput("messages is empty: give at least one message")
    if tools:
        if messages[0].role != "system":
            messages.insert(0, Message(role="system"))
        messages[0] = replace(messages[0], tools=messages[0].tools + _tools("tools", tools))
    return messages


def places_of(messages: Sequence[object]) -> list[str]:
    return [f"messages[{index}]" for index in range(len(messages))]


def with_values(raw: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the arguments of calls as values, where their JSON has escapes. What is not
    as it should be stays for `read_messages` to refuse."""
    return [_with_values(message) for message in raw]


def _with_values(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_values(call) for call in calls]}


def _call_with_values(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str) or "\\" not in arguments:
        return call
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    is_read = isinstance(values, dict)
    return {**call, "function": {**function, "arguments": values}} if is_read else call


def json_kind(value: Any) -> str:
    """What a value of JSON is, for a sentence.

    >>> json_kind(True), json_kind(0.5), json_kind(None), json_kind([])
    ('a boolean', 'a number', 'null', 'a list')
    """
    if value is None:
        return "null"
    kinds = {bool: "a boolean", str: "a text", list: "a list"}
    default = "an object" if isinstance(value, Mapping) else "a number"
    return kinds.get(type(value), default)


def text_of(content: Any, *, where: str, may_refuse: bool = False) -> str:
    """A content is a string, nothing, or a list of text parts. What an assistant said may be a
    refusal."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadInput(f"{where} is {json_kind(content)}, expected text")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == REFUSAL and may_refuse:
            parts.append(_text(part.get(REFUSAL), where))
            continue
        if kind not in TEXT_PARTS:
            raise BadInput(f"{where} has a part of type {str(kind)[:40]!r}, only 'text' is served")
        parts.append(_text(part.get("text"), where))
    return "".join(parts)


def _message(where: str, item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise BadInput(f"{where} is {json_kind(item)}, expected an object")
    role = item.get("role")
    if role not in ROLES:
        shown = f"{role!r:.40}" if isinstance(role, str) else json_kind(role)
        raise BadInput(f"{where}.role is {shown}; served are {', '.join(ROLES)}")
    reasoning = item.get("reasoning_content") or item.get("reasoning")
    response_format = item.get("response_format")
    if response_format is not None and not isinstance(response_format, Mapping):
        raise BadInput(f"{where}.response_format is not an object")
    may_refuse = role == "assistant"
    content = text_of(item.get("content"), where=f"{where}.content", may_refuse=may_refuse)
    if may_refuse and not content:
        content = text_of(item.get(REFUSAL), where=f"{where}.{REFUSAL}")
    return Message(
        role=cast(Role, role),
        content=content,
        reasoning=text_of(reasoning, where=f"{where}.reasoning_content"),
        tool_calls=_tool_calls(where, item.get("tool_calls")),
        call_id=_identity(item.get("tool_call_id"), f"{where}.tool_call_id"),
        tools=_tools(f"{where}.tools", item.get("tools") or ()),
        response_format=response_format,
        place=where,
    )


def _tools(where: str, raw: Any) -> tuple[Mapping[str, Any], ...]:
    """The function descriptions out of {"type": "function", "function": {...}}."""
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise BadInput(f"{where} is not a list")
    functions = []
    for index, tool in enumerate(raw):
        function = _function_of(tool, f"{where}[{index}]")
        if function is None or not isinstance(function.get("name"), str):
            raise BadInput(f"{where}[{index}] is not a function with a name")
        functions.append(function)
    return tuple(functions)


def _function_of(item: Any, where: str) -> Mapping[str, Any] | None:
    """The function of a tool or of a call; other kinds, such as OpenAI's `custom`, have none."""
    if not isinstance(item, Mapping):
        return None
    function, kind = item.get("function"), item.get("type")
    if isinstance(function, Mapping):
        return function
    if isinstance(kind, str) and kind != "function":
        raise BadInput(f"{where}.type is {kind!r:.40}; only function is served")
    return None


def _tool_calls(where: str, raw: Any) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise BadInput(f"{where}.tool_calls is not a list")
    return tuple(_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(raw))


def _tool_call(where: str, call: Any) -> ToolCall:
    function = _function_of(call, where)
    if function is None:
        raise BadInput(f"{where} has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = write_json(arguments)
    elif arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"  # what some servers say of a call without arguments
    name = _text(function.get("name"), f"{where}.function.name")
    return ToolCall(
        name=name,
        arguments=_text(arguments, f"{where}.function.arguments"),
        id=_identity(call.get("id"), f"{where}.id"),
    )


def _identity(value: Any, where: str) -> str | None:
    return None if value is None else _text(value, where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{where} is {json_kind(value)}, expected text")
    return value


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """A call's arguments as an object, or BadInput that names the call."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        shown = str(error)[:100]
        raise BadInput(
            f"the call of {call.name!r} has arguments that are not JSON: {shown}"
        ) from None
    if not isinstance(arguments, dict):
        raise BadInput(f"the call of {call.name!r} has arguments that are not a JSON object")
    return arguments


def write_json(value: object) -> str:
    """JSON as prompts have it: letters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)
