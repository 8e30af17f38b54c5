"""GLM's calls as a grammar: what `GlmParser` reads, and nothing that it cannot.

Older members of the family put a line break behind every tag, newer ones do not: both may come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ess.models.chat.glm_reply import (
    CALL,
    CALL_END,
    KEY,
    KEY_END,
    THINK_END,
    VALUE,
    VALUE_END,
)
from ess.models.chat.grammars.calls import (
    Calls,
    Parameter,
    Rules,
    Schema,
    any_name,
    any_of,
    call_parameters,
    checked_name,
    is_strict,
    json_of,
    literal,
    string_values,
)

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer


def write(tokenizer: Tokenizer, calls: Calls) -> str:
    rules = Rules(tokenizer)
    rules.add("line", '"\\n"?')
    body = rules.add(
        "body",
        any_of(
            _body(rules, f"tool_{place}", tool, bound=calls.must or is_strict(tool))
            for place, tool in enumerate(calls.tools)
        ),
    )
    if calls.must:
        think = rules.until("think", THINK_END) if calls.thinking else ""
        call = rules.add("call", f"{rules.mark(CALL)} {body}")
        return rules.text(f"{think} {call} {f'(line {call})*' if calls.several else ''}")
    opening = rules.until("opening", CALL)
    rest = rules.rest(opening)
    several, single = f"({opening} {body})* {rest}", f"{opening} {body} | {rest}"
    return rules.text(several if calls.several else single)


def _body(rules: Rules, rule: str, tool: Mapping[str, Any], *, bound: bool) -> str:
    """A call from its name on."""
    parameters = call_parameters(
        rules, rule, tool, bound=bound, listed=_parameter, free=_any_parameter
    )
    name = literal(checked_name(str(tool["name"])))
    return rules.add(rule, f"{name} line {parameters} {rules.mark(CALL_END)}")


def _parameter(rules: Rules, rule: str, part: Parameter, root: Schema, *, lenient: bool) -> str:
    """The reader takes a plain string as it is, and anything else as JSON."""
    values = string_values(part.schema)
    if part.schema.get("type") != "string":
        value = f"{json_of(part.schema, root, lenient=lenient)} {rules.mark(VALUE_END)}"
    elif values:
        value = f"{any_of(map(literal, values))} {rules.mark(VALUE_END)}"
    else:
        value = rules.until("value", VALUE_END)
    key = f"{rules.mark(KEY)} {literal(part.name)} {rules.mark(KEY_END)}"
    return rules.add(rule, f"{key} line {rules.mark(VALUE)} {value} line")


def _any_parameter(rules: Rules) -> str:
    name = any_name(rules)
    key = f"{rules.mark(KEY)} {name} {rules.mark(KEY_END)}"
    value = f"{rules.mark(VALUE)} {rules.until('value', VALUE_END)}"
    return rules.add("any_parameter", f"{key} line {value} line")
