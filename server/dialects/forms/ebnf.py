"""Grammars as xgrammar and llama.cpp write them, as Lark grammars.

    root ::= "yes" | [0-9]{1,3} tail
    tail ::= " %"?

vLLM's `structured_outputs.grammar` and SGLang's `ebnf` are such texts. A text without a rule of
this form is a Lark grammar already, and stays as it is.

llguidance splits a text into the longest lexemes first, and does not come back to a shorter one:
after `[a-z]+` as one lexeme no "b" could follow. So every lexeme here is a single character, and
the rules alone decide what may follow. All of this is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ess.errors import BadInput
from ess.models.chat.grammars.calls import literal

RULE: Final = re.compile(r"^[ \t]*([\w-]+)[ \t\r\n]*::=", re.MULTILINE)
TOKEN: Final = re.compile(
    r"""(?P<space>(?:\s+|\#[^\n]*)+)
    |(?P<rule>[\w-]+)\s*::=
    |(?P<name>[\w-]+)
    |"(?P<text>(?:[^"\\\n]|\\.)*)"
    |\[(?P<class>\^?(?:[^\]\\\n]|\\.)*)\]
    |(?P<any>\.)
    |(?P<mark>[|()]|[*+?]|\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\})""",
    re.VERBOSE,
)
CHARACTER: Final = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([^xuU])|([^\\])", re.DOTALL
)
ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
START: Final = "root"


def as_lark(text: str, *, where: str) -> str:
    """The same grammar in Lark."""
    if not RULE.search(text):
        return text
    tokens = list(_tokens(text, where))
    names = {START: "start"}
    for kind, value, _ in tokens:
        if kind == "rule":
            names.setdefault(value, f"rule_{len(names)}")
    written: list[str] = []
    opens = True  # an alternative begins, and is empty if it ends at once
    for kind, value, line in tokens:
        sign = value if kind == "mark" else kind
        if sign in ("rule", "|", ")") and opens and written:
            written.append('""')
        opens = sign in ("rule", "|", "(")
        if kind == "name" and value not in names:
            raise BadInput(f"{where}, line {line}: {value!r:.60} has no rule")
        if kind == "rule":
            written.append(f"\n{names[value]}:")
        else:
            written.append(names[value] if kind == "name" else value)
    return " ".join([*written, '""'] if opens else written).strip()


def _tokens(text: str, where: str) -> Iterator[tuple[str, str, int]]:
    """The kind, the Lark text and the line of each token; names are left as they are."""
    seen: set[str] = set()
    place, line = 0, 1
    while place < len(text):
        token = TOKEN.match(text, place)
        if token is None or not (seen or token.lastgroup in ("rule", "space")):
            shown = text[place : place + 20]
            raise BadInput(f"{where}, line {line}: {shown!r} is not a part of a grammar")
        kind = str(token.lastgroup)
        value = token[kind]
        if kind == "rule" and value in seen:
            raise BadInput(f"{where}, line {line}: {value!r:.60} has a rule already")
        if kind == "rule":
            seen.add(value)
        if kind in ("text", "class", "any"):
            yield kind, _lexemes(kind, value, f"{where}, line {line}"), line
        elif kind != "space":
            yield kind, value, line
        line += token[0].count("\n")
        place = token.end()
    if START not in seen:
        raise BadInput(f"{where} has no rule {START}, where the answer begins")


def _lexemes(kind: str, value: str, where: str) -> str:
    if kind == "any":
        return "/(?s:.)/"
    if kind == "class":
        return _class_of(value, where)
    each = [literal(letter) for letter in _characters(value, where)]
    return f"({' '.join(each)})" if len(each) > 1 else "".join(each) or '""'


def _class_of(value: str, where: str) -> str:
    """A class of characters: letters and digits as they are, others by number. A hyphen between two
    makes a range of them; elsewhere, and behind a range, it stands for itself."""
    negation = "^" if value.startswith("^") else ""
    rest = value[len(negation) :]
    each, written = _characters(rest, where), [match[0] for match in CHARACTER.finditer(rest)]
    if not each:
        return "/(?s:.)/" if negation else r"/[^\s\S]/"
    made, place = "", 0
    while place < len(each):
        made += _in_class(each[place])
        if written[place + 1 : place + 2] == ["-"] and place + 2 < len(each):
            place += 2
            made += f"-{_in_class(each[place])}"
        place += 1
    return f"/[{negation}{made}]/"


def _in_class(letter: str) -> str:
    is_plain = letter.isascii() and letter.isalnum()
    return letter if is_plain else f"\\x{{{ord(letter):x}}}"


def _characters(value: str, where: str) -> list[str]:
    matches = list(CHARACTER.finditer(value))
    if sum(len(each[0]) for each in matches) != len(value):
        raise BadInput(f"{where}: {value!r:.60} has an escape that is cut short")
    return [_character(each, where) for each in matches]


def _character(match: re.Match[str], where: str) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return ESCAPES.get(match[4], match[4]) if match[4] else match[5]
    number = int(digits, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise BadInput(f"{where}: {match[0]} is no character")
    return chr(number)
