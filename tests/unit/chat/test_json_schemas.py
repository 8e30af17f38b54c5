"""Types that schemas allow, and values of replies that are read by them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ess.models.chat.json_schemas import types_of
from ess.models.chat.parsers.dots import DotsParser
from ess.models.chat.parsers.glm import GlmParser
from ess.models.chat.reply import parse

ROOT: dict[str, Any] = {
    "$defs": {
        "color": {"enum": ["red", 3]},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
    },
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, None),
        (True, None),
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": [3]}, None),
        ({"enum": ["1", 2.0, None, True, [], {}]}, "string integer null boolean array object"),
        ({"enum": [2.5, 2]}, {"number", "integer"}),
        ({"const": "1"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "integer"}, {}]}, None),
        ({"anyOf": []}, None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "enum": [None]}, {"null"}),
        ({"$ref": "#/$defs/color"}, {"string", "integer"}),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/none/there"}, None),
        ({"$ref": "https://elsewhere"}, None),
    ],
)
def test_types(schema: object, types: set[str] | str | None) -> None:
    want = types.split() if isinstance(types, str) else types
    assert types_of(schema, ROOT) == (None if want is None else frozenset(want))


def test_a_schema_of_many_references_to_itself_is_read_at_once() -> None:
    step = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 50} for n in range(30)}
    root = {"$defs": {**step, "d30": {"type": "integer"}}}
    assert types_of({"$ref": "#/$defs/d0"}, root) == frozenset({"integer"})


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMAS: dict[str, Any] = {
    "zip": OPTIONAL,
    "unit": {"enum": ["1", "2"]},
    "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]},
    "ratio": {"type": "number"},
}
CASES = [
    ("zip", "02139", "02139"),
    ("zip", "4711", "4711"),
    ("zip", "true", "true"),
    ("zip", "null", None),
    ("zip", '"4711"', "4711"),
    ("unit", "1", "1"),
    ("days", "3", 3),
    ("days", "null", None),
    ("either", "3", 3),
    ("either", "3.5", "3.5"),
    ("ratio", "3", 3),
    ("ratio", "soon", "soon"),
]
TOOLS = ({"name": "tide", "parameters": {"type": "object", "properties": SCHEMAS}},)


@pytest.mark.parametrize(("name", "text", "value"), CASES)
def test_values_of_glm(name: str, text: str, value: object) -> None:
    said = f"<tool_call>tide<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>"
    [call] = parse(GlmParser(thinking=False, tools=TOOLS), said).tool_calls
    assert json.loads(call.arguments) == {name: value}


@pytest.mark.parametrize(("name", "text", "value"), CASES)
def test_values_of_dots(name: str, text: str, value: object) -> None:
    said = (
        '<dots_function_call>\n<invoke name="tide">\n'
        f'<parameter name="{name}">{text}</parameter>\n</invoke>\n</dots_function_call>'
    )
    [call] = parse(DotsParser(tools=TOOLS), said).tool_calls
    assert json.loads(call.arguments) == {name: value}
