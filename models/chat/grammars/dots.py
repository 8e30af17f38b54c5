"""dots3's calls as a grammar: what `DotsParser` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ess.models.chat.grammars.calls import (
    Calls,
    Parameter,
    Rules,
    any_name,
    any_of,
    call_parameters,
    checked_name,
    json_of,
    lines_of_calls,
    literal,
    string_values,
)
from ess.models.chat.json_schemas import TEXT, Schema, types_of
from ess.models.chat.parsers.dots import (
    CALLS,
    CALLS_END,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    THINK,
    THINK_END,
)

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer


def write(tokenizer: Tokenizer, calls: Calls) -> str:
    rules = Rules(tokenizer)
    block = lines_of_calls(rules, calls, _invoke, closing=CALLS_END)
    if calls.must:
        think = ""
        if calls.thinking:
            think = f"({rules.mark(THINK)} {rules.until('think', THINK_END)})?"
        return rules.text(f'{think} "\\n"? {rules.mark(CALLS)} {block}')
    before = rules.until("opening", CALLS)
    return rules.text(f"{before} {block} | {rules.rest(before)}")


def _invoke(rules: Rules, rule: str, tool: Mapping[str, Any], *, bound: bool) -> str:
    opening = literal(f'{INVOKE} name="{checked_name(str(tool["name"]))}">\n')
    parameters = call_parameters(
        rules, rule, tool, bound=bound, listed=_parameter, free=_any_parameter
    )
    return rules.add(rule, f"{opening} {parameters} {rules.mark(INVOKE_END)}")


def _parameter(rules: Rules, rule: str, part: Parameter, root: Schema, *, lenient: bool) -> str:
    """The reader takes what has no other type as a string, and that as it is."""
    values, end = string_values(part.schema), rules.mark(PARAMETER_END)
    types = types_of(part.schema, root) or TEXT
    if "string" not in types or part.schema.get("type", "string") != "string":
        value = f"{json_of(part.schema, root, lenient=lenient)} {end}"
    elif values:
        value = f"{any_of(map(literal, values))} {end}"
    else:
        value = rules.until("value", PARAMETER_END)
    opening = literal(f'{PARAMETER} name="{part.name}">')
    return rules.add(rule, f'{opening} {value} "\\n"')


def _any_parameter(rules: Rules) -> str:
    opening = f'{literal(f"{PARAMETER} name=")} "\\"" {any_name(rules)} "\\">"'
    return rules.add("any_parameter", f'{opening} {rules.until("value", PARAMETER_END)} "\\n"')
