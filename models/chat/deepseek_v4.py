"""DeepSeek-V4's prompt, from its published description.

It differs from V3.2's in five ways. Results of tools are blocks within a user's turn, in the order
of their calls, and turns of users and results that follow each other are one. A prompt for much
reasoning, or the most, begins with words that ask for it. A developer's turn begins with its text.
Calls are in a block of another name, and tools are shown in other words. And where any tools are
shown, all reasoning stays; else what is before the last user's turn has lost it, and the
developers' turns with it.

The strings here are the format itself, which was published with the model under the MIT licence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from ess.errors import BadInput
from ess.models.chat.deepseek_v32 import check_results
from ess.models.chat.dsml import (
    ASSISTANT,
    BEGIN,
    CALLS_V4,
    CALLS_V4_END,
    END,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    THINK,
    THINK_END,
    USER,
    write_calls,
    write_response_format,
)
from ess.models.chat.messages import Message, write_json

_TOOLS: Final = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "{CALLS_V4}" block like the following:

{CALLS_V4}
{INVOKE} name="$TOOL_NAME">
{PARAMETER} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_END}
...
{INVOKE_END}
{INVOKE} name="$TOOL_NAME2">
...
{INVOKE_END}
{CALLS_V4_END}

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_END: Final = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool"
    " calls.\n"
)
_MUCH: Final = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to"
    " resolve the root cause, rigorously stress-testing your logic against all potential paths,"
    " edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step,"
    " considered alternative, and rejected hypothesis to ensure absolutely no assumption is left"
    " unchecked.\n\n"
)
_MOST: Final = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance:"
    " exhaustively decompose the problem into its most fundamental components, trace every causal"
    " chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles"
    " and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
# The model knows low, high and max; without words its effort is low. DeepSeek's own server and vLLM
# take xhigh for high. The model's preview knew two efforts: its max had the words of high.
_WORDS: Final = {"high": _MUCH, "xhigh": _MUCH, "max": _MOST}
_SPEAKERS: Final = ("user", "developer")


def encode(
    messages: Sequence[Message], *, thinking: bool, reply: bool = True, effort: object = None
) -> str:
    """The prompt. With `reply` the conversation must end where the model speaks next."""
    check_results(messages)
    keeps = any(message.tools for message in messages)
    turns = _merged(_by_call(messages))
    if thinking and not keeps:
        last = _last_asked(turns)
        turns = [m for i, m in enumerate(turns) if i >= last or m.role != "developer"]
    if reply and turns[-1].role not in _SPEAKERS:
        raise BadInput(f"the last message is the {turns[-1].role}'s: there is nothing to answer")
    last = -1 if keeps else _last_asked(turns)
    parts = []
    for at, message in enumerate(turns):
        answered = at + 1 == len(turns) or turns[at + 1].role == "assistant"
        parts.append(_turn(message, thinking=thinking and at >= last, answered=answered))
    words = _WORDS.get(effort, "") if thinking and isinstance(effort, str) else ""
    return BEGIN + words + "".join(parts)


def write_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    return _TOOLS + "\n".join(write_json(tool) for tool in tools) + _TOOLS_END


def _by_call(messages: Sequence[Message]) -> list[Message]:
    """Each run of results in the order of the calls that they name; those that name none of them
    come first."""
    ordered: list[Message] = []
    places: dict[str | None, int] = {}
    for is_result, run in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            places = {call.id: place for place, call in enumerate(ordered[-1].tool_calls)}
        ordered += sorted(run, key=lambda m: places.get(m.call_id, 0) if is_result else 0)
    return ordered


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Results are what a user says, and what users say one behind the other is one turn."""
    turns: list[Message] = []
    for message in messages:
        turn = message
        if message.role == "tool":
            turn = Message(role="user", content=f"<tool_result>{message.content}</tool_result>")
        if turn.role == "user" and turns and turns[-1].role == "user":
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{turn.content}")
        else:
            turns.append(turn)
    return turns


def _last_asked(turns: Sequence[Message]) -> int:
    """Where the last user or developer speaks; -1 if none does."""
    return max((i for i, m in enumerate(turns) if m.role in _SPEAKERS), default=-1)


def _turn(message: Message, *, thinking: bool, answered: bool) -> str:
    """`answered`: the assistant is next, in the conversation or with its reply."""
    match message.role:
        case "system":
            return message.content + _additions(message)
        case "assistant":
            return _assistant(message, thinking=thinking)
        case "developer" if not message.content:
            raise BadInput(f"{message.place} is a developer's and has no content")
    mark = f"{ASSISTANT}{THINK if thinking else THINK_END}" if answered else ""
    return f"{USER}{message.content}{_additions(message)}{mark}"


def _additions(message: Message) -> str:
    tools = f"\n\n{write_tools(message.tools)}" if message.tools else ""
    schema = message.response_format
    return tools + (f"\n\n{write_response_format(schema)}" if schema is not None else "")


def _assistant(message: Message, *, thinking: bool) -> str:
    calls = ""
    if message.tool_calls:
        block = write_calls(message.tool_calls, opening=CALLS_V4, closing=CALLS_V4_END)
        calls = f"\n\n{block}"
    reasoning = f"{message.reasoning}{THINK_END}" if thinking else ""
    return f"{reasoning}{message.content}{calls}{END}"
