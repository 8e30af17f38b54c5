"""JSON Schemas of tools, as far as calls need them: references, alternatives, values, types.

Some formats write a parameter's value without its type: then `12` is a number or a text, and the
tool's schema says which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

Schema = Mapping[str, Any]
Types = frozenset[str]

REFERENCES_MAX: Final = 16
TEXT: Final[Types] = frozenset({"string"})
WHOLE_COUNT: Final = re.compile(
    r'("(?:min|max)(?:Length|Items|Properties)"\s*:\s*[0-9]+)\.0+(?![0-9eE])'
)


def with_whole_counts(text: str) -> str:
    """A schema's JSON with 3 for counts such as 3.0, which are whole to JSON Schema, but not to the
    compiler of grammars. Within a const or enum too, where it is the same number.

    >>> with_whole_counts('{"minLength": 3.0, "maxLength": 4.5, "const": 3.0}')
    '{"minLength": 3, "maxLength": 4.5, "const": 3.0}'
    """
    return WHOLE_COUNT.sub(r"\1", text)


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema itself instead of a reference to one of the root's definitions."""
    for _ in range(REFERENCES_MAX):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        meant: Any = root
        for step in path[2:].split("/"):
            meant = meant.get(step) if isinstance(meant, Mapping) else None
        if not isinstance(meant, Mapping):
            break
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        schema = {**shared, **meant}
    return schema if isinstance(schema, Mapping) else {}


def branches(schema: Schema, root: Schema) -> list[Schema]:
    """The alternatives of anyOf or oneOf, or the schema itself."""
    options = alternatives(schema)
    return [resolved(option, root) for option in options] if options else [schema]


def alternatives(schema: Schema) -> list[Any]:
    """Those of anyOf or oneOf, as they are written."""
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list) and options:
            return options
    return []


def listed_values(schema: Schema) -> list[Any] | None:
    """What `enum` or `const` allows; None if neither is there."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else None


# ---- types


def parameter_types(tools: Sequence[Schema]) -> Mapping[tuple[str, str], Types]:
    """By the tool's and the parameter's name; parameters of which nothing is said are left out."""
    types_by_name = {}
    for tool in tools:
        root = tool.get("parameters")
        schema = resolved(root, root) if isinstance(root, Mapping) else {}
        properties = schema.get("properties")
        for name, described in properties.items() if isinstance(properties, Mapping) else ():
            if (types := types_of(described, schema)) is not None:
                types_by_name[str(tool.get("name")), str(name)] = types
    return types_by_name


def types_of(schema: Any, root: Any, seen: dict[int, Types | None] | None = None) -> Types | None:
    """The types of JSON that a value may have; None if the schema does not say. "number" allows
    whole numbers too. Each part of the schema is looked at once, however many references lead to
    it: one that refers to itself says nothing."""
    seen = {} if seen is None else seen
    if id(schema) not in seen:
        seen[id(schema)] = None
        seen[id(schema)] = _types(resolved(schema, root), root, seen)
    return seen[id(schema)]


def _types(schema: Schema, root: Any, seen: dict[int, Types | None]) -> Types | None:
    sets = [_named(schema)]
    if (values := listed_values(schema)) is not None:
        sets.append(frozenset(map(type_of, values)))
    each = [types_of(option, root, seen) for option in alternatives(schema)]
    known = [types for types in each if types is not None]
    if each and len(known) == len(each):
        sets.append(frozenset().union(*known))
    parts = [types for types in sets if types is not None]
    return frozenset.intersection(*parts) if parts else None


def _named(schema: Schema) -> Types | None:
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return frozenset([*names, "integer"] if "number" in names else names)


def type_of(value: object) -> str:
    """The type of a value that was read from JSON; 3.0 is a whole number there."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")
