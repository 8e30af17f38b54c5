"""DeepSeek-V3.2's prompt: a conversation as the one string that the model was trained on.

The prompt alternates marks and text. A user's turn ends with the assistant's mark and a think mark:
`<think>` opens reasoning, `</think>` says that there is none. The rule for the think mark, and for
whether an assistant's reasoning is repeated, is one cut at the last user turn: before it, reasoning
has been dropped and every think mark is `</think>`; from it on, with thinking enabled, reasoning
stays, also across tool calls. In a thinking conversation a developer's turn before the cut is left
out altogether.

Results of tools are one block per assistant turn, opened by the first and closed by the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from ess.errors import BadInput
from ess.models.chat.dsml import (
    ASSISTANT,
    BEGIN,
    END,
    THINK,
    THINK_END,
    USER,
    write_calls,
    write_response_format,
    write_tools,
)
from ess.models.chat.messages import Message


def encode(messages: Sequence[Message], *, thinking: bool, reply: bool = True) -> str:
    """The prompt. With `reply` the conversation must end where the model speaks next."""
    if thinking:
        last = _last_user(messages)
        messages = [m for i, m in enumerate(messages) if i >= last or m.role != "developer"]
    check_results(messages)
    if reply and messages[-1].role not in ("user", "developer", "tool"):
        raise BadInput(f"the last message is the {messages[-1].role}'s: there is nothing to answer")
    last = _last_user(messages)
    return BEGIN + "".join(
        _turn(messages, index, thinking=thinking and index >= last)
        for index in range(len(messages))
    )


def _last_user(messages: Sequence[Message]) -> int:
    """Where the last user or developer speaks; -1 if none does."""
    return max((i for i, m in enumerate(messages) if m.role in ("user", "developer")), default=-1)


def _turn(messages: Sequence[Message], index: int, *, thinking: bool) -> str:
    message = messages[index]
    match message.role:
        case "system":
            return message.content + _additions(message)
        case "user":
            return f"{USER}{message.content}{ASSISTANT}{_think(thinking)}"
        case "developer":
            if not message.content:
                raise BadInput(f"{message.place} is a developer's and has no content")
            asked = f"\n\n# The user's message is: {message.content}"
            return f"{USER}{_additions(message)}{asked}{ASSISTANT}{_think(thinking)}"
        case "assistant":
            return _assistant(message, thinking=thinking)
        case "tool":
            return _result(messages, index, thinking=thinking)


def _think(thinking: bool) -> str:
    return THINK if thinking else THINK_END


def _additions(message: Message) -> str:
    tools = f"\n\n{write_tools(message.tools)}" if message.tools else ""
    schema = message.response_format
    return tools + (f"\n\n{write_response_format(schema)}" if schema is not None else "")


def _assistant(message: Message, *, thinking: bool) -> str:
    if thinking and not message.reasoning and not message.tool_calls:
        raise BadInput(
            f"{message.place} is an assistant's with neither reasoning nor calls of tools after the"
            " last user message; with thinking on it needs one of them"
        )
    reasoning = f"{message.reasoning}{THINK_END}" if thinking else ""
    calls = f"\n\n{write_calls(message.tool_calls)}" if message.tool_calls else ""
    return f"{reasoning}{message.content}{calls}{END}"


def _result(messages: Sequence[Message], index: int, *, thinking: bool) -> str:
    first = messages[index - 1].role != "tool"
    last = index + 1 == len(messages) or messages[index + 1].role != "tool"
    opened = "\n\n<function_results>" if first else ""
    closed = f"\n</function_results>\n\n{_think(thinking)}" if last else ""
    return f"{opened}\n<result>{messages[index].content}</result>{closed}"


def check_results(messages: Sequence[Message]) -> None:
    """Every run of results follows an assistant's turn with as many calls."""
    index = 0
    while index < len(messages):
        begin = index
        while index < len(messages) and messages[index].role == "tool":
            index += 1
        calls = messages[begin - 1].tool_calls if begin else ()
        if index > begin and len(calls) != index - begin:
            raise BadInput(
                f"{messages[begin].place} begins {index - begin} tool results,"
                f" but the message before it made {len(calls)} calls"
            )
        index += 1
