"""Calls whose arguments are one JSON object, as grammars: A.X-K2's and Mistral's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ess.models.chat.grammars.calls import (
    Calls,
    Rules,
    any_of,
    checked_name,
    is_strict,
    json_of,
    literal,
    parameters_of,
    root_of,
)
from ess.models.chat.parsers.hermes import (
    CALL,
    CALL_END,
    MISTRAL_ARGS,
    MISTRAL_CALL,
    MISTRAL_THINK,
    MISTRAL_THINK_END,
    THINK_END,
)

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer


def hermes(tokenizer: Tokenizer, calls: Calls) -> str:
    rules = Rules(tokenizer)
    rules.add("line", '"\\n"?')
    body = rules.add("body", any_of(_hermes(rules, *each) for each in _bodies(rules, calls)))
    think = rules.until("think", THINK_END) if calls.thinking else ""
    return _written(rules, calls, CALL, body, think=think, between="line")


def _hermes(rules: Rules, name: str, arguments: str) -> str:
    opening = literal(f'{{"name": "{name}", "arguments": ')
    return f'line {opening} {arguments} "}}" line {rules.mark(CALL_END)}'


def mistral(tokenizer: Tokenizer, calls: Calls) -> str:
    rules = Rules(tokenizer)
    body = rules.add(
        "body",
        any_of(
            f"{literal(name)} {rules.mark(MISTRAL_ARGS)} {arguments}"
            for name, arguments in _bodies(rules, calls)
        ),
    )
    think = ""
    if calls.thinking and calls.must:
        think = f"({rules.mark(MISTRAL_THINK)} {rules.until('think', MISTRAL_THINK_END)})?"
    return _written(rules, calls, MISTRAL_CALL, body, think=think, between="")


def _written(rules: Rules, calls: Calls, mark: str, body: str, *, think: str, between: str) -> str:
    """A body after the mark of each call."""
    if calls.must:
        call = rules.add("call", f"{rules.mark(mark)} {body}")
        more = f"({between} {call})*" if calls.several else ""
        return rules.text(f"{think} {call} {more}")
    opening = rules.until("opening", mark)
    rest = rules.rest(opening)
    several, single = f"({opening} {body})* {rest}", f"{opening} {body} | {rest}"
    return rules.text(several if calls.several else single)


def _bodies(rules: Rules, calls: Calls) -> list[tuple[str, str]]:
    """Each tool's name, and the rule of its arguments."""
    return [
        (checked_name(str(tool["name"])), _arguments(rules, f"tool_{place}", tool, calls))
        for place, tool in enumerate(calls.tools)
    ]


def _arguments(rules: Rules, rule: str, tool: Mapping[str, Any], calls: Calls) -> str:
    """Bound to the tool's schema where that lists its parameters and calls must keep to it."""
    is_bound = calls.must or is_strict(tool)
    is_listed = is_bound and parameters_of(tool) is not None
    schema = {"type": "object", **(root_of(tool) if is_listed else {})}
    return rules.add(rule, json_of(schema, schema, lenient=not is_strict(tool)))
