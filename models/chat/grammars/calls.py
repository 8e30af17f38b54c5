"""Grammars of replies that call tools, as Lark: the names and arguments that a reply may have.

A format writes its marks; what is common to all of them is here: the marks as the vocabulary has
them, free text up to a mark, JSON of a schema. A mark may hold special tokens. Text never matches
those, so a mark is a list of pieces, literal texts and ids of special tokens.

Strings that a format writes without quotes follow `enum` and `const` of their schema, and nothing
else of it (`pattern`, `maxLength`, ...). Parameters come in the schema's order, the optional ones
or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ess.errors import BadInput
from ess.models.chat.json_schemas import Schema, listed_values, resolved, with_whole_counts

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer

WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,32}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What is asked of the calls of a reply: with `must` it is nothing else than calls, and only
    one without `several`. `thinking` as in the prompt. `tools` are function descriptions; with
    `must` the arguments of all follow their schemas, else those of strict tools."""

    tools: Sequence[Mapping[str, Any]]
    must: bool
    several: bool
    thinking: bool


class Rules:
    """Rules of a Lark grammar, each made once under its name."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = {"TEXT": r"TEXT: /(.|\n)*/"}

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules.values(), ""])

    def add(self, name: str, body: str, *, lazy: bool = False) -> str:
        self._rules[name] = f"{name}{'[lazy]' if lazy else ''}: {body}"
        return name

    def mark(self, text: str) -> str:
        """The mark as one expression."""
        return " ".join(map(_written, self._pieces(text)))

    def until(self, name: str, mark: str) -> str:
        """A rule for free text up to the mark, and the mark."""
        pieces = self._pieces(mark)
        special = next((at for at, piece in enumerate(pieces) if isinstance(piece, int)), None)
        if special is None:
            return self.add(name, f"TEXT {literal(mark)}", lazy=True)
        rest = " ".join(map(_written, pieces[special:]))
        if special == 0:
            return self.add(name, f"TEXT {rest}")
        near = self.add(f"{name}_near", f"TEXT {_written(pieces[0])}", lazy=True)
        return self.add(name, f"{near}+ {rest}")

    def rest(self, name: str) -> str:
        """Free text behind or instead of that rule, in which the mark does not come."""
        near = f"{name}_near"
        return f"{near}* TEXT" if near in self._rules else "TEXT"

    def _pieces(self, text: str) -> list[str | int]:
        pieces: list[str | int] = []
        held = b""
        for token in self._tokenizer.encode(text):
            if token not in self._tokenizer.special_ids:
                held += self._tokenizer.bytes_of(token)
                continue
            pieces += [held.decode()] if held else []
            pieces.append(token)
            held = b""
        return [*pieces, held.decode()] if held else pieces


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _written(piece: str | int) -> str:
    return literal(piece) if isinstance(piece, str) else f"<[{piece}]>"


def any_of(options: Iterable[str]) -> str:
    return f"({' | '.join(options)})"


def json_of(schema: Schema, root: Schema, *, lenient: bool) -> str:
    """JSON of a part of the schema `root`, whose definitions it may name."""
    part = dict(schema)
    for name in ("$defs", "definitions"):
        if isinstance(root.get(name), Mapping):
            part.setdefault(name, root[name])
    part["x-guidance"] = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    try:
        return f"%json {with_whole_counts(json.dumps(part))}"
    except RecursionError:
        raise BadInput("tools: a schema is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    schema: Schema
    is_required: bool


def parameters_of(tool: Mapping[str, Any]) -> list[Parameter] | None:
    """None if the schema does not list them: then any may come. BadInput for a strict one."""
    schema = root_of(tool)
    properties = schema.get("properties")
    is_open = any(name in schema for name in ("anyOf", "oneOf", "allOf", "$ref")) or (
        not properties and bool(schema.get("additionalProperties"))
    )
    if is_open or not isinstance(properties or {}, Mapping):
        if is_strict(tool):
            raise BadInput(
                f"tools: {tool['name']} is strict, but its parameters are no object with properties"
            )
        return None
    required = schema.get("required")
    names = set(map(str, required)) if isinstance(required, Sequence) else set()
    return [
        Parameter(checked_name(name), resolved(part, schema), name in names)
        for name, part in (properties or {}).items()
        if part is not False
    ]


def call_parameters(
    rules: Rules,
    rule: str,
    tool: Mapping[str, Any],
    *,
    bound: bool,
    listed: Callable[..., str],
    free: Callable[[Rules], str],
) -> str:
    """The parameters of a call, `bound` to the tool's schema if that lists them: the format writes
    a rule for each that is `listed`, and a rule for any that is `free`."""
    parts = parameters_of(tool) if bound else None
    if parts is None:
        return f"{free(rules)}*"
    root, lenient = root_of(tool), not is_strict(tool)
    return " ".join(
        listed(rules, f"{rule}_{place}", part, root, lenient=lenient)
        + ("" if part.is_required else "?")
        for place, part in enumerate(parts)
    )


def lines_of_calls(rules: Rules, calls: Calls, invoke: Callable[..., str], *, closing: str) -> str:
    """What follows the mark that opens calls: a call in each line, by `invoke`, and the closing
    mark."""
    call = any_of(
        invoke(rules, f"tool_{place}", tool, bound=calls.must or is_strict(tool))
        for place, tool in enumerate(calls.tools)
    )
    body = rules.add("call", f'{call} "\\n"') + ("+" if calls.several else "")
    return rules.add("block", f'"\\n" {body} {rules.mark(closing)}')


def any_name(rules: Rules) -> str:
    """The name of a parameter that no schema lists."""
    return rules.add("ANY_NAME", r'/[^"<>\n]{1,256}/')


def root_of(tool: Mapping[str, Any]) -> Schema:
    schema = tool.get("parameters")
    return resolved(schema, schema) if isinstance(schema, Mapping) else {}


def is_strict(tool: Mapping[str, Any]) -> bool:
    return tool.get("strict") is True


def string_values(schema: Schema) -> list[str] | None:
    listed = listed_values(schema)
    return None if listed is None else [value for value in listed if isinstance(value, str)]


def checked_name(name: str) -> str:
    """Names stand between marks, so they hold none of a mark's characters."""
    if not name or len(name) > 256 or any(char in '"<>' or not char.isprintable() for char in name):
        raise BadInput(f"tools: the name {name!r:.80} has characters that calls cannot carry")
    return name
