"""GLM's calls as a grammar: what `GlmParser` reads, and nothing that it cannot.

Older members of the family put a line break behind every tag, newer ones do not: both may come.
"""

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
    is_strict,
    json_of,
    literal,
    string_values,
)
from ess.models.chat.json_schemas import Schema
from ess.models.chat.parsers.glm import GLM, Tags

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer


def write(tokenizer: Tokenizer, calls: Calls, *, tags: Tags = GLM) -> str:
    rules, marked = Rules(tokenizer), _Marked(tags)
    rules.add("line", '"\\n"?')
    body = rules.add(
        "body",
        any_of(
            marked.body(rules, f"tool_{place}", tool, bound=calls.must or is_strict(tool))
            for place, tool in enumerate(calls.tools)
        ),
    )
    call = rules.add("call", f"{rules.mark(tags.call)} {body}")
    begun = f"{body}{_more(calls, call)}"
    if tags.outer:
        begun = f"line {call}{_more(calls, call)} line {rules.mark(tags.outer_end)}"
    if calls.must:
        think = rules.until("think", tags.think_end) if calls.thinking else ""
        return rules.text(f"{think} {rules.mark(tags.outer or tags.call)} {begun}")
    opening = rules.until("opening", tags.outer or tags.call)
    rest = rules.rest(opening)
    each = begun if tags.outer else body
    several, single = f"({opening} {each})* {rest}", f"{opening} {each} | {rest}"
    return rules.text(several if calls.several and not tags.outer else single)


def _more(calls: Calls, call: str) -> str:
    return f" (line {call})*" if calls.several else ""


class _Marked:
    """Calls by their tags."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags

    def body(self, rules: Rules, rule: str, tool: Mapping[str, Any], *, bound: bool) -> str:
        """A call from its name on."""
        parameters = call_parameters(
            rules, rule, tool, bound=bound, listed=self._parameter, free=self._any_parameter
        )
        name, tags = literal(checked_name(str(tool["name"]))), self._tags
        ended = f"{name} {rules.mark(tags.name_end)}" if tags.name_end else name
        return rules.add(rule, f"{ended} line {parameters} {rules.mark(tags.call_end)}")

    def _parameter(
        self, rules: Rules, rule: str, part: Parameter, root: Schema, *, lenient: bool
    ) -> str:
        """The reader takes a plain string as it is, and anything else as JSON."""
        tags, values = self._tags, string_values(part.schema)
        if part.schema.get("type") != "string":
            written = json_of(part.schema, root, lenient=lenient)
            value = f"{written} {rules.mark(tags.value_end)}"
        elif values:
            value = f"{any_of(map(literal, values))} {rules.mark(tags.value_end)}"
        else:
            value = rules.until("value", tags.value_end)
        key = f"{rules.mark(tags.key)} {literal(part.name)} {rules.mark(tags.key_end)}"
        return rules.add(rule, f"{key} line {rules.mark(tags.value)} {value} line")

    def _any_parameter(self, rules: Rules) -> str:
        tags, name = self._tags, any_name(rules)
        key = f"{rules.mark(tags.key)} {name} {rules.mark(tags.key_end)}"
        value = f"{rules.mark(tags.value)} {rules.until('value', tags.value_end)}"
        return rules.add("any_parameter", f"{key} line {value} line")
