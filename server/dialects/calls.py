"""The grammar that a reply's tool calls must follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ess.engine.tokens.grammar import Grammar
from ess.errors import BadInput
from ess.models.chat.grammars.calls import Calls, is_strict
from ess.server.dialects.sampling_params import Wanted
from ess.server.dialects.tools import Tool, ToolChoice
from ess.server.process.service import Service


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


def require_calls(service: Service, wanted: Wanted, rules: ReplyRules) -> None:
    """Gives `wanted` the grammar for the calls that tool_choice, `strict` and parallel_tool_calls
    ask for. If the model may choose, the client's own grammar goes first, without calls."""
    is_named = isinstance(rules.choice, Mapping)
    must = is_named or rules.choice == "required"
    if must and wanted.grammar is not None:
        raise BadInput("tool_choice is for calls alone: leave out response_format and its like")
    is_free = rules.parallel and not any(map(is_strict, rules.functions))
    if not rules.tools or wanted.grammar is not None or (is_free and not must):
        return
    several = rules.parallel and not is_named
    calls = Calls(tools=rules.functions, must=must, several=several, thinking=rules.thinking)
    text = service.style.call_grammar(service.tokenizer, calls)
    if text is not None:
        wanted.grammar = _grammar(text)
    elif must:
        raise BadInput("tool_choice is not served: how this model writes its calls is not known")


def _grammar(text: str) -> Grammar:
    try:
        return Grammar("lark", text)
    except BadInput as error:
        raise BadInput(f"tools: their schemas make {error}") from None
