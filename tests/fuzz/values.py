"""JSON values out of chance, and JSON values a little changed."""

from __future__ import annotations

import copy
import random
import string
from collections.abc import Iterator, Sequence
from typing import Any

NUMBERS: Sequence[Any] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 17, 255, 256, 257, 4095, 4096, 1 << 20),
    *(1 << 31, (1 << 31) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 70, -(1 << 63)),
    *(0.0, -0.0, 0.5, 1.5, 2.0, -2.5, 1e-9, 1e300, 1e308, float("nan"), float("inf")),
)
TEXTS: Sequence[str] = (
    *("", "a", "\x00", "\n", "\u00e9\u6f22\U0001f642", "\ud800", "a\udfff", "\ufffe", "5", "-1"),
    *("user", "system", "assistant", "tool", "developer", "text", "function", "auto", "none"),
    *("required", "json_schema", "json_object", "structural_tag", "high", "test-model", "null"),
    *("<think>", "</think>", "<|end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "{{ 7 }}", "{"),
    *('{"a": 1}', "[0-9]+", "(a|b)*c", "root ::= [a-z]+", 'start: "a" "b"', "x" * 300),
)
NAMES: Sequence[str] = (
    *("role", "content", "type", "function", "name", "json_schema", "schema", "tools", "text"),
    *("arguments", "tool_calls", "id", "parameters", "properties", "items", "strict", "enum"),
    *("reasoning_content", "tool_call_id", "thinking", "enable_thinking", "$ref", "anyOf", ""),
)


def text(source: random.Random) -> str:
    if source.random() < 0.7:
        return source.choice(TEXTS)
    return "".join(source.choices(string.printable, k=source.randrange(12)))


def name(source: random.Random) -> str:
    return source.choice(NAMES) if source.random() < 0.8 else text(source)


def value(source: random.Random, depth: int) -> Any:
    kind = source.randrange(4 if depth else 2)
    if kind == 0:
        return source.choice(NUMBERS)
    if kind == 1:
        return text(source)
    count = source.randrange(4)
    if kind == 2:
        return [value(source, depth - 1) for _ in range(count)]
    return {name(source): value(source, depth - 1) for _ in range(count)}


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree that may be set anew: what holds it, and the key there."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, item in list(items):
            yield tree, key
            yield from nodes(item)


def changed(source: random.Random, tree: Any, other: Any) -> Any:
    """One node is replaced, moved, repeated or dropped; some come from the other tree."""
    places = list(nodes(tree))
    if not places:
        return value(source, 3)
    holder, key = source.choice(places)
    match source.randrange(8):
        case 0:
            holder[key] = value(source, 2)
        case 1:
            del holder[key]
        case 2:
            holder[key] = [holder[key]]
        case 3:
            holder[key] = {name(source): holder[key]}
        case 4:
            _repeat(source, holder, key)
        case 5:
            taken = list(nodes(other))
            if taken:
                there, at = source.choice(taken)
                holder[key] = copy.deepcopy(there[at])
        case 6:
            holder[key] = tweaked(source, holder[key])
        case 7:
            _add(source, holder)
    return tree


def _repeat(source: random.Random, holder: Any, key: Any) -> None:
    count = source.choice((2, 3, 20, 129, 300))
    if isinstance(holder[key], list | str) and len(holder[key]) * count < 20_000:
        holder[key] = holder[key] * count
    else:
        holder[key] = [copy.deepcopy(holder[key]) for _ in range(min(count, 20))]


def _add(source: random.Random, holder: Any) -> None:
    if isinstance(holder, list):
        holder.insert(source.randrange(len(holder) + 1), value(source, 2))
    else:
        holder[name(source)] = value(source, 2)


def tweaked(source: random.Random, item: Any) -> Any:
    """The same kind, another value."""
    if isinstance(item, bool) or item is None:
        return not item
    if isinstance(item, int | float):
        return source.choice((item + 1, item - 1, -item, item * 2, *NUMBERS))
    if isinstance(item, str):
        cut = source.randrange(len(item) + 1)
        return source.choice((item[:cut], item[cut:], item[:cut] + text(source) + item[cut:]))
    return value(source, 2)


def raw_changed(source: random.Random, raw: str, tokens: Sequence[str]) -> str:
    """A text or bytes: cut, repeated, overwritten, or with a word of the format put in."""
    at = source.randrange(len(raw) + 1)
    end = min(len(raw), at + source.choice((1, 2, 4, 16, 64)))
    match source.randrange(6):
        case 0:
            return raw[:at] + raw[end:]
        case 1:
            return raw[:end] + raw[at:]
        case 2:
            return raw[:at] + source.choice(tokens) + raw[at:]
        case 3:
            return raw[:at] + source.choice(tokens) + raw[end:]
        case 4:
            return raw[:at] + chr(source.randrange(256)) + raw[at + 1 :]
        case _:
            return raw[:at] + raw[at:end] * source.choice((2, 8, 100)) + raw[end:]
