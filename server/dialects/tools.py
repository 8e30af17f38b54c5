"""The tools of a chat: which of them the prompt shows, and in what form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ess.errors import BadInput
from ess.models.chat.messages import text_of
from ess.server.dialects import schemas
from ess.server.process.bounds import TOOLS_MAX

OF_SERVER: Final = frozenset({"messages", "tools", "add_generation_prompt"})
NO_EFFORTS: Final = ("none", "no_think")
SEARCH: Final = "web_search"

Tool = Mapping[str, Any]
ToolChoice = str | Mapping[str, Any] | None


def offered_tools(tools: Sequence[Tool] | None, choice: ToolChoice) -> list[Tool]:
    """The tools that the prompt shows: only those that tool_choice names, if it does."""
    if len(tools or ()) > TOOLS_MAX:
        raise BadInput(f"tools has {len(tools or ()):,} tools; at most {TOOLS_MAX} are read")
    if isinstance(choice, Mapping):
        return [tool for name in _names_in(choice) for tool in _named(tools or (), name)]
    if choice not in (None, "none", "auto", "required"):
        raise BadInput(f"tool_choice is {choice!r:.40}, must be none, auto, required or a function")
    if choice == "required" and not tools:
        raise BadInput("tool_choice is required, but there are no tools")
    return [] if choice == "none" else list(tools or ())


def mode_of(choice: ToolChoice) -> ToolChoice:
    """Of `allowed_tools` its mode, `auto` or `required`; any other choice as it is."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required"):
        raise BadInput(f"tool_choice: mode is {mode!r:.40}, must be auto or required")
    return str(mode)


def _names_in(choice: Mapping[str, Any]) -> list[Any]:
    """The name of a function, or those of `allowed_tools`."""
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        mode_of(choice)
        allowed = choice.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if not isinstance(listed, list) or not 0 < len(listed) <= TOOLS_MAX:
            raise BadInput(f"tool_choice: tools must be a list of 1 to {TOOLS_MAX} tools")
        names = [_name_of(each) if isinstance(each, Mapping) else None for each in listed]
        return [name for at, name in enumerate(names) if name not in names[:at]]
    if kind != "function":
        raise BadInput(f"tool_choice.type is {kind!r:.40}; function and allowed_tools are served")
    return [_name_of(choice)]


def _named(tools: Sequence[Tool], name: Any) -> list[Tool]:
    named = [tool for tool in tools if _name_of(tool) == name]
    if not named:
        raise BadInput(f"tool_choice has the name {name!r:.60}, which none of the tools has")
    return named


def _name_of(tool: Tool) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def wants_thinking(template: Mapping[str, Any] | None, effort: str | None) -> bool | None:
    """Whether to think: vLLM's and SGLang's keyword, or OpenAI's reasoning_effort, which templates
    may have as a name too. None where the client does not say."""
    given = template or {}
    for name in ("thinking", "enable_thinking"):
        if given.get(name) is not None:
            return bool(given[name])
    effort = given.get("reasoning_effort", effort)
    return None if effort is None else effort not in NO_EFFORTS


def thinks(ask: schemas.ChatAsk) -> bool | None:
    """Whether to think: by the keyword for a template, else by the first of the fields that other
    servers have for it, else by OpenAI's reasoning_effort."""
    template, given = ask.chat_template_kwargs or {}, ask.reasoning or {}
    if not {"thinking", "enable_thinking", "reasoning_effort"} & template.keys():
        if ask.thinking is not None:
            return is_thinking(ask.thinking)
        if ask.enable_thinking is not None:
            return ask.enable_thinking
        if isinstance(given.get("enabled"), bool):
            return bool(given["enabled"])
    return wants_thinking(template, effort_of(ask))


def effort_of(ask: schemas.ChatAsk) -> Any:
    """OpenRouter's field, or else OpenAI's."""
    return (ask.reasoning or {}).get("effort") or ask.reasoning_effort


Response = schemas.ResponsesAsk | schemas.InputTokensAsk
Messages = schemas.MessagesAsk | schemas.CountTokensAsk
Templated = schemas.ChatAsk | schemas.TokenizeAsk | Response | Messages


def response_thinks(ask: Response) -> bool | None:
    """Whether a response thinks: by the keyword for a template, else by OpenAI's effort."""
    return wants_thinking(ask.chat_template_kwargs, (ask.reasoning or {}).get("effort"))


def message_thinks(ask: Messages) -> bool:
    """Whether a message thinks: by the keyword for a template, else by Anthropic's `thinking`."""
    thinking, wanted = is_thinking(ask.thinking), wants_thinking(ask.chat_template_kwargs, None)
    return thinking if wanted is None else wanted


def settle(ask: schemas.ChatAsk | Response, asked: bool | None, *, default: bool) -> bool:
    """What was asked, or the default, which the ask says from now on: the prompt and the reply are
    read in two processes."""
    if asked is None:
        ask.chat_template_kwargs = {**(ask.chat_template_kwargs or {}), "enable_thinking": default}
    return default if asked is None else asked


def names_of(ask: Templated) -> dict[str, Any]:
    """What the chat template gets by name, beside what the server itself says. Numbers stay as they
    are written: 1024.0 is a float to templates in transformers, vLLM and SGLang too."""
    names: dict[str, Any] = {}
    if isinstance(ask, Messages):
        names = {"reasoning_effort": (ask.output_config or {}).get("effort")}
    if isinstance(ask, Response):
        names = {"reasoning_effort": (ask.reasoning or {}).get("effort")}
    if isinstance(ask, schemas.ChatAsk):
        names = {"reasoning_effort": effort_of(ask), **(ask.thinking or {})}
        names.pop("type", None)
    given = ask.chat_template_kwargs or {}
    for name in sorted(OF_SERVER & (names | given).keys()):
        where = "chat_template_kwargs" if name in given else "thinking"
        raise BadInput(f"{where} has {name}: give it as a field of the request")
    return {name: value for name, value in (names | given).items() if value is not None}


def goes_on(ask: schemas.ChatAsk | schemas.TokenizeAsk) -> bool:
    """Whether the reply continues the last message: vLLM's and SGLang's field, or the `prefix` of
    DeepSeek's own server in the message."""
    last = ask.messages[-1] if ask.messages else {}
    if last.get("role") == "assistant" and last.get("prefix") is True:
        return True
    if ask.continue_final_message and ask.add_generation_prompt:
        raise BadInput("continue_final_message is true, so add_generation_prompt must be false")
    if ask.add_generation_prompt is False and not ask.continue_final_message:
        raise BadInput("add_generation_prompt is false, which needs continue_final_message")
    return bool(ask.continue_final_message)


def instructed(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What a developer says are instructions, and chat formats have no such speaker, or drop what
    it said before the last question. At the beginning they become one message with the system's,
    later they are a turn of the user. A developer with tools or a format of its own is DeepSeek's,
    and stays."""
    is_beginning = True
    leading: list[Mapping[str, Any]] = []
    rest: list[Mapping[str, Any]] = []
    for message in messages:
        instructs = _instructs(message)
        is_beginning = is_beginning and (instructs or message.get("role") == "system")
        if is_beginning:
            leading.append(message)
        else:
            rest.append({**message, "role": "user"} if instructs else message)
    return [*(_joined(leading) if any(map(_instructs, leading)) else leading), *rest]


def _instructs(message: Mapping[str, Any]) -> bool:
    is_own = message.get("tools") or message.get("response_format")
    return message.get("role") == "developer" and not is_own


def _joined(leading: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A single message as it is, several with a blank line between their texts."""
    content = leading[0].get("content")
    if len(leading) > 1:
        texts = [
            text_of(message.get("content"), where=f"messages[{place}].content")
            for place, message in enumerate(leading)
        ]
        content = "\n\n".join(filter(None, texts))
    fields = {name: value for message in leading for name, value in message.items()}
    return [{**fields, "role": "system", "content": content}]


def tools_of_responses(given: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """The functions in the form of a chat's tools, those of a namespace under their full names. A
    search that is offered beside functions is left out: a model need not search."""
    offered: list[Tool] = []
    for place, tool in enumerate(given or ()):
        match tool.get("type"):
            case "function":
                _check_name(tool, f"tools[{place}]")
                offered.append(_as_chat_tool(tool))
            case "namespace":
                offered += [
                    _as_chat_tool({**inner, "name": full_name(tool.get("name"), inner.get("name"))})
                    for inner in _inner(tool, where=f"tools[{place}]")
                ]
            case kind if kind != SEARCH:
                raise BadInput(
                    f"tools[{place}].type is {kind!r:.40}; function and namespace are served"
                )
    if given and not offered:
        is_search = any(tool.get("type") == SEARCH for tool in given)
        advice = f": nothing is searched here, leave out {SEARCH}" if is_search else ""
        raise BadInput(f"tools has no function{advice}")
    _refuse_doubles(offered, namespaces_of(given))
    return offered


def _refuse_doubles(offered: Sequence[Tool], spaces: Mapping[str, object]) -> None:
    """A call of a name that two tools have would be taken for that of the namespace."""
    names = [_name_of(tool) for tool in offered]
    for name in spaces:
        if names.count(name) > 1:
            raise BadInput(f"tools: {name!r:.80} is the full name of two functions")


def _as_chat_tool(tool: Mapping[str, Any]) -> Tool:
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


def _inner(tool: Mapping[str, Any], *, where: str) -> list[Mapping[str, Any]]:
    """The functions of a namespace."""
    inner = tool.get("tools")
    if not isinstance(tool.get("name"), str) or not isinstance(inner, list):
        raise BadInput(f"{where} must have a name and a list of tools")
    for place, each in enumerate(inner):
        if not isinstance(each, Mapping) or each.get("type") != "function":
            raise BadInput(f"{where}.tools[{place}] must be a function")
        _check_name(each, f"{where}.tools[{place}]")
    return inner


def _check_name(function: Mapping[str, Any], where: str) -> None:
    if not isinstance(function.get("name"), str):
        raise BadInput(f"{where} must have a name")


def full_name(namespace: Any, name: Any) -> Any:
    """What the model calls a function of a namespace.

    >>> full_name("mcp__disk__", "read"), full_name("disk", "read"), full_name(None, "read")
    ('mcp__disk__read', 'disk__read', 'read')
    """
    if not isinstance(namespace, str) or not isinstance(name, str) or not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


def namespaces_of(given: Sequence[Mapping[str, Any]] | None) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function in a namespace, by its full name."""
    spaces = [tool for tool in given or () if tool.get("type") == "namespace"]
    return {
        full_name(tool["name"], inner["name"]): (tool["name"], inner["name"])
        for tool in spaces
        for inner in tool["tools"]
    }


def tools_of_messages(given: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Anthropic's tools in the form of a chat's tools."""
    offered: list[Tool] = []
    for place, tool in enumerate(given or ()):
        if tool.get("type") not in (None, "custom"):
            kind = tool.get("type")
            raise BadInput(f"tools[{place}].type is {kind!r:.40}; only custom is served")
        if not isinstance(tool.get("input_schema"), Mapping):
            raise BadInput(f"tools[{place}].input_schema must be an object")
        function = {name: tool[name] for name in ("name", "description") if name in tool}
        function["parameters"] = tool["input_schema"]
        if "strict" in tool:
            function["strict"] = tool["strict"]
        offered.append({"type": "function", "function": function})
    return offered


def choice_of_messages(given: Mapping[str, Any] | None) -> ToolChoice:
    match given:
        case None | {"type": "auto"}:
            return None
        case {"type": "none"}:
            return "none"
        case {"type": "any"}:
            return "required"
        case {"type": "tool"}:
            return {"type": "function", "function": {"name": given.get("name")}}
    kind = given.get("type")
    raise BadInput(f"tool_choice.type is {kind!r:.40}; auto, any, tool and none are served")


def is_thinking(given: Mapping[str, Any] | None) -> bool:
    """Whether Anthropic's `thinking` asks for it; its budget_tokens are no bound here."""
    kind = "disabled" if given is None else given.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise BadInput(f"thinking.type is {kind!r:.40}; enabled, adaptive and disabled are served")
    return kind != "disabled"


def _under_full_name(chosen: Any) -> Any:
    """A function as a choice names it, by the name that the model calls it by."""
    if not isinstance(chosen, Mapping):
        return chosen
    return {"name": full_name(chosen.get("namespace"), chosen.get("name"))}


def choice_of_responses(given: ToolChoice) -> ToolChoice:
    """In the form of a chat's choice."""
    if not isinstance(given, Mapping):
        return given
    match given.get("type"):
        case "function":
            return {"type": "function", "function": _under_full_name(given)}
        case "allowed_tools":
            listed = given.get("tools")
            tools = [_under_full_name(each) for each in listed] if isinstance(listed, list) else []
            allowed = {"mode": given.get("mode"), "tools": [{"function": each} for each in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return {"type": str(given.get("type"))}
