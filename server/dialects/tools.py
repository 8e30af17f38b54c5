"""The tools of a chat: which of them the prompt shows, and in what form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ess.errors import BadInput
from ess.server.dialects import schemas
from ess.server.process.bounds import TOOLS_MAX

Tool = Mapping[str, Any]
ToolChoice = str | Mapping[str, Any] | None


def offered_tools(tools: Sequence[Tool] | None, choice: ToolChoice) -> list[Tool]:
    """The tools that the prompt shows; with a named tool_choice only that tool."""
    if len(tools or ()) > TOOLS_MAX:
        raise BadInput(f"tools has {len(tools or ()):,} tools; at most {TOOLS_MAX} are read")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        named = [tool for tool in tools or () if _name_of(tool) == name]
        if not named:
            raise BadInput(f"tool_choice has the name {name!r:.60}, which none of the tools has")
        return named
    if choice not in (None, "none", "auto", "required"):
        raise BadInput(f"tool_choice is {choice!r:.40}; none, auto, required or a function")
    if choice == "required" and not tools:
        raise BadInput("tool_choice is required, but there are no tools")
    return [] if choice == "none" else list(tools or ())


def _name_of(tool: Tool) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def wants_thinking(template: Mapping[str, Any] | None, effort: str | None) -> bool:
    """Whether to think: vLLM's and SGLang's keyword, or OpenAI's reasoning_effort."""
    for name in ("thinking", "enable_thinking"):
        if template is not None and name in template:
            return bool(template[name])
    return effort not in (None, "none")


def goes_on(ask: schemas.ChatAsk) -> bool:
    """Whether the reply continues the last message."""
    if ask.continue_final_message and ask.add_generation_prompt:
        raise BadInput("continue_final_message is true, so add_generation_prompt must be false")
    if ask.add_generation_prompt is False and not ask.continue_final_message:
        raise BadInput("add_generation_prompt is false: only with continue_final_message")
    return bool(ask.continue_final_message)


def tools_of_responses(given: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """The functions in the form of a chat's tools."""
    offered: list[Tool] = []
    for place, tool in enumerate(given or ()):
        if tool.get("type") != "function":
            kind = tool.get("type")
            raise BadInput(f"tools[{place}].type is {kind!r:.40}; only function is served")
        function = {name: value for name, value in tool.items() if name != "type"}
        offered.append({"type": "function", "function": function})
    return offered


def choice_of_responses(given: ToolChoice) -> ToolChoice:
    if not isinstance(given, Mapping):
        return given
    if given.get("type") != "function":
        kind = given.get("type")
        raise BadInput(f"tool_choice.type is {kind!r:.40}; only function is served")
    return {"type": "function", "function": {"name": given.get("name")}}
