"""Grammars that were written to do harm, and grammars that were drawn by lot."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource

import numpy as np
import pytest

from ess.engine.tokens import grammar_child
from ess.engine.tokens.grammar import Grammar
from ess.errors import BadInput
from tests.support.kin import fields
from tests.unit.tokens.test_grammar import END, matcher, texts

LONG = (pytest.mark.slow, pytest.mark.long)

pytest.importorskip("llguidance")


def drawn_schema(rng: random.Random, depth: int) -> object:
    kind = rng.choice(["integer", "number", "string", "enum", "const", "array", "object", "any"])
    if depth == 0 or kind in ("integer", "number"):
        keys = rng.sample(
            ["minimum", "maximum", "multipleOf", "exclusiveMinimum"], rng.randrange(3)
        )
        values = [rng.choice([0, 1, -7, 3.5, 1e9, 99991, 1e-7, 10**18, "x"]) for _ in keys]
        return {"type": rng.choice(["integer", "number"]), **dict(zip(keys, values, strict=True))}
    deeper = [drawn_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    names = [rng.choice(["a", "bb", "$ref", "\u2603", ""]) for _ in deeper]
    schemas: dict[str, object] = {
        "string": {
            "type": "string",
            "pattern": drawn_regex(rng, 3),
            "maxLength": rng.randrange(99),
        },
        "enum": {"enum": [rng.choice([None, 1, "x" * rng.randrange(50), [], {}]) for _ in deeper]},
        "const": {"const": deeper},
        "array": {"type": "array", "items": deeper[0], "minItems": rng.choice([0, 3, 10**6])},
        "object": {
            "type": "object",
            "properties": dict(zip(names, deeper, strict=True)),
            "required": names[:1],
            "additionalProperties": rng.choice([True, False, deeper[0]]),
        },
        "any": {rng.choice(["anyOf", "allOf", "oneOf"]): deeper},
    }
    return schemas[kind] if rng.random() < 0.95 else {"$ref": "#"}


def drawn_regex(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(["a", "[a-z]", ".", r"\w", r"\p{L}", "", "(", "é", "[^x]", r"\d", "$"])
    parts = [drawn_regex(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    how = rng.choice(["join", "either", "repeat", "repeat", "some"])
    low = rng.choice([0, 2, 90, 5000])
    return {
        "join": "".join(parts),
        "either": f"({'|'.join(parts)})",
        "repeat": f"({parts[0]}){{{low},{low * rng.choice([1, 9])}}}",
        "some": f"({parts[0]}){rng.choice('*+?')}",
    }[how]


def drawn_lark(rng: random.Random, count: int) -> str:
    names = [rng.choice([f"r{n}", f"T{n}"]) for n in range(count)]
    lines = ["start: " + names[0]]
    for name in names:
        parts = [
            rng.choice([rng.choice(names), f"/{drawn_regex(rng, 1)}/", '"x"', "%json {}", "("])
            for _ in range(rng.randrange(1, 5))
        ]
        lines.append(f"{name}: " + rng.choice([" ", " | ", " & "]).join(parts))
    return "\n".join(lines)


def drawn(rng: random.Random) -> Grammar:
    kind = rng.choice(["json_schema", "regex", "lark"])
    texts = {
        "json_schema": lambda: json.dumps(drawn_schema(rng, 3)),
        "regex": lambda: drawn_regex(rng, 4),
        "lark": lambda: drawn_lark(rng, rng.randrange(1, 12)),
    }
    return Grammar(kind, texts[kind]() or "x")  # type: ignore[arg-type]


def processor_s(process: int) -> float:
    """Processor time of the process and of the children that it has reaped."""
    return sum(map(int, fields(process)[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("seed", "count"), [(1, 25), pytest.param(2, 600, marks=LONG)])
def test_drawn_grammars_are_followed_or_refused(fresh, seed, count):
    """Whatever they are: no other error, and no more processor time than their limits allow."""
    rng, compiled_count, step_count = random.Random(seed), 0, 0
    matcher("regex", "a", by=fresh).close()
    first = fresh._sandbox._process.pid
    for _ in range(count):
        grammar, output = drawn(rng), []
        with contextlib.suppress(BadInput):
            follower = matcher(grammar.kind, grammar.text, by=fresh)
            compiled_count += 1
            while not follower.failure and len(output) < 12 and END not in output:
                [mask] = follower.allowed(output, [])
                output.append(int(rng.choice(np.flatnonzero(mask))))
                step_count += 1
            follower.close()
    assert fresh._sandbox._process.pid == first
    assert compiled_count > count / 10
    for room in list(fresh._rooms.values()):
        fresh._end(room)
    most = count * grammar_child.COMPILE_CPU_S + step_count * grammar_child.STEP_CPU_S
    assert processor_s(first) < 1.0 + most


def nested(depth: int) -> dict[str, object]:
    """allOf within allOf."""
    schema: dict[str, object] = {"type": "integer"}
    for least in range(depth):
        schema = {"allOf": [schema, {"minimum": least}]}
    return schema


MULTIPLES = {"anyOf": [{"type": "integer", "multipleOf": of} for of in (9989, 9971, 9961, 9929)]}
ATTACKS = {
    "a schema that contains itself": {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "allOf, 30 deep": nested(30),
    "allOf, 200 deep": nested(200),
    "3,900 alternatives": {"anyOf": [{"const": n} for n in range(3900)]},
    "60 KB of alternatives": {"enum": [f"v{n:06}" for n in range(5400)]},
    "a thousand keys": {"properties": {f"k{n}": {"type": "integer"} for n in range(1500)}},
    "several multiples": MULTIPLES,
    "a multiple in the depth": {"properties": {"a": {"type": "integer", "multipleOf": 999983}}},
    "a million items": {"type": "array", "minItems": 10**5, "maxItems": 10**6},
    "repeated repetition": "(a{1,99999}){1,99999}",
    "repeated choice": "((a|b|cc){1,1000}){1,1000}",
    "looking far back": "(.*a.{300}){1,20}",
    "optional and not": "(a?){5000}a{5000}",
    "every letter": r"(\p{L}|\p{N}|\w){1,3000}",
}


SLOW = ("several multiples", "a multiple in the depth")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ATTACKS],
)
def test_an_attack_is_followed_or_refused_within_its_limits(fresh, name):
    """Neither a crash, nor a process that goes on, nor memory in ours."""
    asked, output = ATTACKS[name], []
    kind, text = ("regex", asked) if isinstance(asked, str) else ("json_schema", json.dumps(asked))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(BadInput):
        follower = matcher(kind, text, by=fresh)
        while not follower.failure and len(output) < 30 and END not in output:
            output.append(int(np.flatnonzero(follower.allowed(output, [])[0])[-1]))
        follower.close()
    assert texts(matcher("regex", "ab", by=fresh).allowed([], [])[0]) == {"ab"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    for room in list(fresh._rooms.values()):
        fresh._end(room)
    assert processor_s(fresh._sandbox._process.pid) < 8.0
