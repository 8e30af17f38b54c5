"""DeepSeek-V3.2's calls as a grammar: what `DeepSeekParser` reads, and nothing that it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ess.errors import BadInput
from ess.models.chat.dsml import (
    CALLS,
    CALLS_END,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    THINK_END,
)
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
from ess.models.chat.json_schemas import Schema, branches, listed_values

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer


def write(
    tokenizer: Tokenizer, calls: Calls, *, opening: str = CALLS, closing: str = CALLS_END
) -> str:
    """`opening` and `closing` are around a block of calls."""
    rules = Rules(tokenizer)
    block = lines_of_calls(rules, calls, _invoke, closing=closing)
    if calls.must:
        think = rules.until("think", THINK_END) if calls.thinking else ""
        return rules.text(f'{think} "\\n\\n" {rules.mark(opening)} {block}')
    before = rules.until("opening", opening)
    return rules.text(f"{before} {block} | {rules.rest(before)}")


def _invoke(rules: Rules, rule: str, tool: Mapping[str, Any], *, bound: bool) -> str:
    name = literal(f' name="{checked_name(str(tool["name"]))}">\n')
    parameters = call_parameters(
        rules, rule, tool, bound=bound, listed=_parameter, free=_any_parameter
    )
    return rules.add(rule, f"{rules.mark(INVOKE)} {name} {parameters} {rules.mark(INVOKE_END)}")


def _parameter(rules: Rules, rule: str, part: Parameter, root: Schema, *, lenient: bool) -> str:
    """A string as it is, anything else as JSON; a schema may allow both."""
    forms = []
    for schema in branches(part.schema, root):
        forms += _forms(rules, part.name, schema, root, lenient=lenient)
    if not forms:
        raise BadInput(f"tools: the schema of {part.name!r:.80} allows nothing")
    return rules.add(rule, any_of(forms))


def _forms(rules: Rules, name: str, schema: Schema, root: Schema, *, lenient: bool) -> list[str]:
    """`type` may be a list, and missing where `enum` and `const` say all."""
    values, kinds = string_values(schema), schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else None
    end = rules.mark(PARAMETER_END)
    forms = []
    if values:
        written = any_of(map(literal, values))
        forms.append(f'{_opening(rules, name, "true")} {written} {end} "\\n"')
    elif values is None and (listed is None or "string" in listed):
        free = rules.until("value", PARAMETER_END)
        forms.append(f'{_opening(rules, name, "true")} {free} "\\n"')
    others = _without_strings(schema, listed)
    if others is not None:
        written = json_of(others, root, lenient=lenient)
        forms.append(f'{_opening(rules, name, "false")} {written} {end} "\\n"')
    return forms


def _without_strings(schema: Schema, kinds: list[Any] | None) -> Schema | None:
    """The schema of what is written as JSON; None if strings are all that it allows."""
    values = listed_values(schema)
    if values is not None:
        others = [value for value in values if not isinstance(value, str)]
        return {"enum": others} if others else None
    if kinds is None:
        return schema
    left = [kind for kind in kinds if kind != "string"]
    return {**schema, "type": left} if left else None


def _any_parameter(rules: Rules) -> str:
    name = any_name(rules)
    free, end = rules.until("value", PARAMETER_END), rules.mark(PARAMETER_END)
    written = json_of({}, {}, lenient=True)
    opening = f'{rules.mark(PARAMETER)} " name=\\"" {name}'
    forms = [
        f'{opening} "\\" string=\\"true\\">" {free}',
        f'{opening} "\\" string=\\"false\\">" {written} {end}',
    ]
    return rules.add("any_parameter", f'{any_of(forms)} "\\n"')


def _opening(rules: Rules, name: str, is_string: str) -> str:
    attributes = f' name="{name}" string="{is_string}">'
    return f"{rules.mark(PARAMETER)} {literal(attributes)}"
