"""Target `grammars`: schemas, expressions and grammars of clients, compiled and walked along.

    {"kind": "json_schema", "text": text, "picks": [...], "drafts": [...]}

A text compiles or is refused in a sentence, within a bound of CPU and of memory. Whatever is picked
of what a mask allows, the next mask allows something too.
"""

from __future__ import annotations

import json
import random
from typing import Any, get_args

from ess.engine.tokens.grammar import Kind
from tests.fuzz import values
from tests.fuzz.fuzzer import Finding, Value
from tests.fuzz.grammar_child import GRAMMAR_FILES
from tests.fuzz.kept_child import KeptChild
from tests.fuzz.lines import Lines, sources

CPU_S_MAX = 4.0
GROWTH_KB_MAX = 200 << 10
TEXT_CHARS_MAX = 40_000
KEYWORDS: dict[str, list[Any]] = {
    "type": [
        "object",
        "array",
        "string",
        "integer",
        "number",
        "boolean",
        "null",
        ["string", "null"],
    ],
    "properties": [{"a": {"type": "integer"}}, {"": True, "b": {"$ref": "#"}}],
    "required": [["a"], ["a", "b", "zz"]],
    "additionalProperties": [False, {"type": "string"}],
    "patternProperties": [{"^a+$": {"type": "null"}}],
    "items": [{"type": "integer"}, False],
    "prefixItems": [[{"type": "integer"}, {"const": "a"}]],
    "minItems": [0, 3, 1 << 20],
    "maxItems": [0, 3, 1 << 31],
    "minLength": [0, 5, 100_000],
    "maxLength": [0, 5, 100_000],
    "minimum": [0, -5, 1e300, 0.1],
    "exclusiveMaximum": [10, 1e-300],
    "multipleOf": [3, 0.01, 97, 10007, (1 << 31) - 1, 0],
    "pattern": ["^[a-z]+$", "(a|b)*c{3,9}", "(?i)x", "^(a{1,50}){1,50}$", "\\d{4}-\\d\\d"],
    "format": ["date-time", "uuid", "email", "ipv6", "unknown"],
    "enum": [["a", 1, None], [{"a": [1]}]],
    "const": ["a", {"a": 1}, 1e100],
    "anyOf": [[{"type": "integer"}, {"type": "string"}]],
    "oneOf": [[{"minimum": 1}, {"maximum": 5}]],
    "allOf": [[{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]],
    "not": [{"type": "null"}],
    "$ref": ["#", "#/$defs/x", "http://example.com/x"],
    "$defs": [{"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}],
    "x-guidance": [{"whitespace_flexible": False}, {"whitespace_pattern": "[ ]{0,9}"}],
}
TOKENS = (
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "*",
        "+",
        "?",
        "|",
        ".",
        "^",
        "$",
        "\\",
        "\\d",
        "\\p{L}",
        "{2,9}",
    ),
    *("{0,100}", "{1000}", "[^a]", "(?i)", "(?=a)", "(?P<n>a)", "\\1", "[a-z]", "\\x00", "\u00e9"),
    *("start: ", "a: b\n", "b: a\n", '"x"', "/[a-z]+/", "%import common.INT\n", "%ignore / /\n"),
    *("%json {}", "%llguidance {}\n", "start: start start | \n", "x[max_tokens=5]: /.*/\n", "::="),
    *("<tool>", "[stop='a']", "~2..5", "&", "~", "\n", '"', "'", "//", "#", "\x00", "\ud800"),
)
REGEXES = ("[0-9]+", "(a|b)*c", "\\w{1,40}@\\w+", "(x+x+)+y", ".{0,200}z", "a{0,50}b{0,50}")
LARKS = (
    'start: "a" start | "b"',
    'start: item+\nitem: /[a-z]{1,5}/ | "(" start ")"',
    'start: %json {"type": "integer"}',
    'start: x y\nx[stop="q"]: /.*/\ny: "z"{2,5}',
)


class GrammarTexts:
    name = "grammars"

    def __init__(self) -> None:
        self.lines = Lines(sources(*GRAMMAR_FILES))
        self._child = KeptChild("tests.fuzz.grammar_child")
        self._rss_kb = 0

    def __enter__(self) -> GrammarTexts:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.close()

    def restart(self) -> None:
        self._child.close()
        self._rss_kb = 0

    # ---- inputs

    def fresh(self, source: random.Random) -> Value:
        kind = source.choice([*get_args(Kind), "json_schema", "json_schema"])
        match kind:
            case "json_schema":
                text = json.dumps(_schema(source, 3))
            case "regex":
                text = "".join(source.choices((*TOKENS, *REGEXES), k=source.randrange(1, 6)))
            case _:
                text = source.choice(LARKS) + "\n" + "".join(source.choices(TOKENS, k=2))
        return {"kind": kind, "text": text, **_walk(source)}

    def changed(self, source: random.Random, value: Value, other: Value) -> Value:
        if source.random() < 0.15:
            return {**value, **_walk(source)}
        text = value["text"]
        if value["kind"] == "json_schema" and source.random() < 0.8:
            text = json.dumps(_changed_schema(source, text, other["text"]))
        else:
            text = values.raw_changed(source, text, (*TOKENS, *REGEXES))
        return {**value, "text": text[:TEXT_CHARS_MAX]}

    # ---- running

    def run(self, value: Value) -> None:
        kind = str(value["kind"])
        answer = self._child.ask(value, place=kind, cpu_s_max=CPU_S_MAX)
        self.lines.add((name, number) for name, number in answer["lines"])
        if "wrong" in answer:
            error, place, sentence = answer["wrong"]
            raise Finding(error, f"{kind} {place}", sentence)
        before, self._rss_kb = self._rss_kb, max(self._rss_kb, answer["rss_kb"])
        if before and answer["rss_kb"] - before > GROWTH_KB_MAX:
            grown = answer["rss_kb"] - before
            raise Finding("memory", kind, f"one text took {grown >> 10} MiB more than any before")


def _walk(source: random.Random) -> dict[str, list[int]]:
    picks = [source.randrange(1 << 16) for _ in range(source.choice((2, 8, 20)))]
    drafts = [source.randrange(4096) for _ in range(source.choice((0, 1, 3)))]
    return {"picks": picks, "drafts": drafts}


def _schema(source: random.Random, depth: int) -> Any:
    if depth <= 0 or source.random() < 0.05:
        return source.choice((True, False, {}, {"type": "string"}, {"type": "integer"}))
    made: dict[str, Any] = {}
    for name in source.sample(sorted(KEYWORDS), source.randrange(1, 5)):
        made[name] = source.choice(KEYWORDS[name])
        if name in ("items", "not", "additionalProperties") and source.random() < 0.5:
            made[name] = _schema(source, depth - 1)
        elif name in ("anyOf", "allOf", "oneOf", "prefixItems") and source.random() < 0.5:
            made[name] = [_schema(source, depth - 1) for _ in range(source.randrange(1, 4))]
        elif name in ("properties", "$defs") and source.random() < 0.5:
            made[name] = {key: _schema(source, depth - 1) for key in "ax"}
    return made


def _changed_schema(source: random.Random, text: str, other: str) -> Any:
    try:
        tree, there = json.loads(text), json.loads(other)
    except (ValueError, RecursionError):
        return _schema(source, 3)
    if isinstance(tree, dict) and source.random() < 0.5:
        places = [
            item for holder, key in values.nodes(tree) if isinstance(item := holder[key], dict)
        ]
        holder = source.choice([tree, *places])
        name = source.choice(sorted(KEYWORDS))
        holder[name] = source.choice(KEYWORDS[name])
        return tree
    return values.changed(source, tree, there)
