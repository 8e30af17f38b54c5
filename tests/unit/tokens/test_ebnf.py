"""Grammars of xgrammar and llama.cpp allow what a slow reader of the same tree allows."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest

from ess.errors import BadInput
from ess.server.dialects.forms.ebnf import as_lark
from tests.unit.tokens.test_grammar import END, ids, matcher

JSON_TEXT = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws ( string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


def accepts(text: str, answer: str) -> bool:
    """Whether the answer can be made token by token, and may end there."""
    with contextlib.closing(matcher("lark", as_lark(text, where="ebnf"))) as follower:
        made: list[int] = []
        for token in ids(answer):
            if not follower.allowed(made, [])[0][token]:
                return False
            made.append(token)
        return bool(follower.allowed(made, [])[0][END])


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= name "b"\nname ::= [a-z]+', "aab", "aa"),
        ('root ::= "a" "ac" | "aa" "b"', "aac", "aa"),
        ('root ::= "ab"{ 2 , 3}', "ababab", "ab"),
        ('root ::= root "a" | "b"', "baa", "a"),
        ("root ::= ()* [^a-c]", "d", "c"),
        ("root ::= [a-c-e]", "-", "d"),
        (r"root ::= [\x61/\]-]", "]", "b"),
        (r'root ::= "\u00e9\t" . [^]', "é\t\nx", "é"),
        ('root ::= ("a" | ) Foo-Bar\nFoo-Bar ::= "x" | # two\n | "y"', "x", "z"),
        ('root::="a"#x', "a", "b"),
        ('start: "a"', "a", "b"),
        (JSON_TEXT, r'{"a": [1, -2.5e3, "x\u00e9y", null], "b": {"c": true}}', "[1]"),
    ],
)
def test_a_grammar_allows_what_it_says(text: str, good: str, bad: str):
    assert accepts(text, good)
    assert not accepts(text, bad)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('root ::= "a" | foo', "ebnf, line 1: 'foo' has no rule"),
        ('rot ::= "a"', "ebnf has no rule root, where the answer begins"),
        ('root ::= "a"\nroot ::= "b"', "ebnf, line 2: 'root' has a rule already"),
        ('root ::= "a"\n @', "ebnf, line 2: '@' is not a part of a grammar"),
        ('"a"\nroot ::= "b"', "line 1: .* is not a part of a grammar"),
        ('root ::= "a', "line 1: '\"a' is not a part of a grammar"),
        (r'root ::= "\ud800"', r"line 1: \\ud800 is no character"),
        (r"root ::= [\U00110000]", r"line 1: \\U00110000 is no character"),
        (r'root ::= "\x4"', "has an escape that is cut short"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_line(text: str, sentence: str):
    with pytest.raises(BadInput, match=sentence):
        as_lark(text, where="ebnf")


# ---- drawn grammars


def drawn(rng: random.Random, rules: int, depth: int = 3) -> tuple[Any, ...]:
    kind = rng.choice(["text", "class", "all", "any", "times", "rule"] if depth else ["text"])
    match kind:
        case "text":
            return kind, "".join(rng.choice("ab") for _ in range(rng.randrange(4)))
        case "class":
            return kind, rng.choice(["a", "b", "ab"]), rng.random() < 0.3
        case "rule" if rules:
            return kind, rng.randrange(rules)
        case "times":
            least = rng.randrange(3)
            return kind, drawn(rng, rules, depth - 1), least, max(1, least + rng.randrange(3))
    parts = [drawn(rng, rules, depth - 1) for _ in range(rng.randrange(1, 4))]
    return ("any" if kind == "rule" else kind), parts


def written(node: tuple[Any, ...]) -> str:
    match node:
        case ("text", text):
            return f'"{text}"'
        case ("class", of, is_not):
            return f"[{'^' if is_not else ''}{of}]"
        case ("rule", number):
            return f"r-{number}"
        case ("times", inner, least, most):
            return f"({written(inner)}){{{least},{most}}}"
        case ("all", parts):
            return " ".join(map(written, parts))
        case (_, parts):
            return f"({' | '.join(map(written, parts))})"
    raise AssertionError(node)


def ends(node: tuple[Any, ...], rules: list[Any], text: str, at: int) -> set[int]:
    """Where a part may end that begins at a place."""

    def inside(part: tuple[Any, ...], here: int) -> set[int]:
        return ends(part, rules, text, here)

    match node:
        case ("text", said):
            return {at + len(said)} if text.startswith(said, at) else set()
        case ("class", of, is_not):
            return {at + 1} if at < len(text) and (text[at] in of) != is_not else set()
        case ("rule", number):
            return inside(rules[number], at)
        case ("times", inner, least, most):
            seen, reached = {at}, ({at} if least == 0 else set())
            for count in range(1, most + 1):
                seen = set(itertools.chain(*(inside(inner, here) for here in seen)))
                reached |= seen if count >= least else set()
            return reached
        case ("all", parts):
            seen = {at}
            for part in parts:
                seen = set(itertools.chain(*(inside(part, here) for here in seen)))
            return seen
        case (_, parts):
            return set(itertools.chain(*(inside(part, at) for part in parts)))
    raise AssertionError(node)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_grammars_allow_what_a_slow_reader_does(seed: int):
    rng = random.Random(seed)
    rules = [drawn(rng, number) for number in range(4)]
    lines = [f"r-{number} ::= {written(rule)}" for number, rule in enumerate(rules)]
    text = "\n".join(["root ::= r-3", *lines])
    for length in range(5):
        for letters in itertools.product("ab", repeat=length):
            answer = "".join(letters)
            is_one = len(answer) in ends(rules[3], rules, answer, 0)
            assert accepted(text, answer) == is_one, (text, answer)


def accepted(text: str, answer: str) -> bool:
    """A grammar that allows no text at all is refused when it is compiled."""
    try:
        return accepts(text, answer)
    except BadInput as error:
        if "no text can be completed" in str(error):
            return False
        raise
