"""What a reply may hold besides text, and the grammar that its tool calls must follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ess.engine.tokens.grammar import Grammar
from ess.errors import BadInput
from ess.models.chat.grammars.calls import Calls, is_strict
from ess.models.chat.styles import ChatStyle
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects import schemas
from ess.server.dialects.forms.constraints import Form
from ess.server.dialects.tools import (
    Tool,
    ToolChoice,
    choice_of_messages,
    choice_of_responses,
    message_thinks,
    mode_of,
    offered_tools,
    response_thinks,
    thinks,
    tools_of_messages,
    tools_of_responses,
)

Conversation = schemas.ChatAsk | schemas.ResponsesAsk | schemas.MessagesAsk


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRules:
    """What a reply may hold: thinking, and calls of these tools, several at once if `parallel`."""

    tools: Sequence[Tool]
    choice: ToolChoice
    parallel: bool
    thinking: bool

    @property
    def functions(self) -> list[Mapping[str, Any]]:
        return [tool["function"] for tool in self.tools]


def rules_of(ask: Conversation) -> ReplyRules:
    """The rules of a reply, from an ask whose prompt has been read: reading notes in it whether to
    think, if it does not say, and whether the reply is the rest of a message, which is not preceded
    by thinking."""
    choice: ToolChoice
    tools: Sequence[Tool] | None
    match ask:
        case schemas.ChatAsk():
            choice, tools = ask.tool_choice, ask.tools
            parallel = ask.parallel_tool_calls is not False
            thinking = bool(thinks(ask)) and not ask.continue_final_message
        case schemas.ResponsesAsk():
            choice, tools = choice_of_responses(ask.tool_choice), tools_of_responses(ask.tools)
            parallel = ask.parallel_tool_calls is not False
            thinking = bool(response_thinks(ask))
        case schemas.MessagesAsk():
            choice, tools = choice_of_messages(ask.tool_choice), tools_of_messages(ask.tools)
            parallel = (ask.tool_choice or {}).get("disable_parallel_tool_use") is not True
            thinking = message_thinks(ask)
    return ReplyRules(
        tools=offered_tools(tools, choice),
        choice=mode_of(choice),
        parallel=parallel,
        thinking=thinking,
    )


def grammar_of_calls(
    rules: ReplyRules, own: Form | None, style: ChatStyle, tokenizer: Tokenizer
) -> Form | None:
    """The grammar for the calls that tool_choice, `strict` and parallel_tool_calls ask for. If the
    model may choose, the client's own grammar goes first, without calls."""
    is_named = isinstance(rules.choice, Mapping)
    must = is_named or rules.choice == "required"
    if must and own is not None:
        raise BadInput("tool_choice is for calls: leave out response_format and other grammars")
    is_free = rules.parallel and not any(map(is_strict, rules.functions))
    if not rules.tools or own is not None or (is_free and not must):
        return own
    several = rules.parallel and not is_named
    calls = Calls(tools=rules.functions, must=must, several=several, thinking=rules.thinking)
    text = style.call_grammar(tokenizer, calls)
    if text is None and must:
        raise BadInput(
            "tool_choice is not served for this model, whose format of calls is unknown: give auto"
            " or none"
        )
    return None if text is None else _form(text)


def _form(text: str) -> Form:
    try:
        return Form("tools", Grammar("lark", text))
    except BadInput as error:
        raise BadInput(f"tools: their schemas make {error}") from None
