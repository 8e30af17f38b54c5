"""Matchers over the embedded vocabulary; what a model does under one is in tests/model."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ess.models
from ess.engine.tokens import grammar as grammar_module
from ess.engine.tokens.grammar import Grammar, Grammars, Matcher
from ess.errors import BadInput, Unavailable
from ess.models.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
CHECKPOINT = Path(ess.models.__file__).parent / "tiny" / "checkpoint"
END = 1
EXPLOSIVE = "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "x"\n' for i in range(1000))
EXPLOSIVE += 'r1000: "y"\n'
VOCABULARY = 4100


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(CHECKPOINT)


@functools.cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset({END}))


def matcher(kind: str, text: str = "", *, by: Grammars | None = None) -> Matcher:
    by, grammar = by or grammars(), Grammar(kind, text)  # type: ignore[arg-type]
    by.want(grammar)
    while (made := by.matcher(grammar)) is None:
        by.wait()
    return made


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def texts(mask: np.ndarray) -> set[str]:
    return {tokenizer().decode([token], keep_special=True) for token in np.flatnonzero(mask)}


def test_masks_say_what_may_follow_and_where_the_text_may_end():
    follower = matcher("regex", "ab?")
    [mask] = follower.allowed([], [])
    assert mask.shape == (VOCABULARY,)
    assert texts(mask) == {"a", "ab"}
    assert texts(follower.allowed(ids("a"), [])[0]) == {"b", "<|end|>"}
    assert texts(follower.allowed([*ids("a"), *ids("b")], [])[0]) == {"<|end|>"}
    assert follower.failure == ""


@pytest.mark.parametrize(
    "drafts", [[], ["a"], ["a", "b"], ["a", "x"], ["x"], ["a", "b", None, "a"]]
)
def test_walking_along_drafts_changes_nothing(drafts):
    """None stands for the end. Masks go up to the first draft that is forbidden or the end."""
    follower = matcher("regex", "(ab|ac)*")
    tokens = [END if text is None else ids(text)[0] for text in drafts]
    masks = follower.allowed([], tokens)
    valid = {(): 1, ("a",): 2, ("a", "b"): 3, ("a", "x"): 2, ("x",): 1, ("a", "b", None, "a"): 3}
    assert len(masks) == valid[tuple(drafts)]
    for count, mask in enumerate(masks):
        fresh = matcher("regex", "(ab|ac)*")
        assert np.array_equal(mask, fresh.allowed(tokens[:count], [])[0])
    again = follower.allowed(ids("a"), [])
    assert np.array_equal(again, matcher("regex", "(ab|ac)*").allowed(ids("a"), []))


@pytest.mark.parametrize(
    ("kind", "text", "space_count"),
    [
        ("json_object", "", 32),
        ("json_schema", '{"type": "array"}', 32),
        ("json_schema", '{"type": "array", "x-guidance": {"whitespace_flexible": false}}', 0),
        ("json_schema", '{"type": "array", "x-guidance": {}}', 99),
    ],
)
def test_white_space_is_bounded_unless_the_schema_says_otherwise(kind, text, space_count):
    opening = ids("{" if kind == "json_object" else "[")
    space = ids(" ")[0]
    drafts = [*opening, *[space] * 99]
    assert len(matcher(kind, text).allowed([], drafts)) - 2 == space_count


def test_two_requests_with_one_grammar_do_not_meet():
    one, two = matcher("lark", 'start: "yes" | "no"'), matcher("lark", 'start: "yes" | "no"')
    one.allowed(ids("no"), [])
    assert texts(two.allowed([], [])[0]) >= {"y", "n"}


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("regex", "[a-z", "unclosed character class"),
        ("lark", "start: foo", "unknown name"),
        ("json_schema", "{nope", "json_schema"),
        ("json_schema", '{"type": "nonsense"}', "Invalid type: nonsense"),
        ("json_schema", '{"type": "object", "dependentSchemas": {}}', "dependentSchemas"),
        ("json_schema", '{"$ref": "file:///etc/hostname"}', "does not fetch"),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000, "grammar"),
        ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "nested"),
        ("regex", "\ud800", "surrogates"),
    ],
)
def test_what_is_no_grammar_is_refused_in_its_own_words(kind, text, sentence):
    with pytest.raises(BadInput, match=sentence):
        matcher(kind, text)


def test_a_long_chain_of_rules_does_not_end_the_process():
    """In a process of its own: if it does, it takes the tests along."""
    rules = "".join(f"a{i:x}: a{i + 1:x}\n" for i in range(4500))
    text = f'start: a0\n{rules}a{4500:x}: "x"'
    code = (
        "from tests.unit.test_grammar import matcher, ids\n"
        f"chained = matcher('lark', {text!r})\n"
        "assert chained.allowed([], [])[0][ids('x')].all(), chained.failure\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_grammar_that_is_too_much_work_ends_the_text():
    follower, output = matcher("lark", EXPLOSIVE), []
    while not follower.failure:
        assert len(output) < 4, "the limits are not at work"
        [mask] = follower.allowed(output, [])
        output.append(int(np.flatnonzero(mask)[-1]))
    assert texts(mask) == texts(follower.allowed(output, [])[0]) == {"<|end|>"}
    assert "max is 2000" in follower.failure


def test_a_limit_met_on_the_way_allows_only_the_end():
    follower = matcher("regex", "(a|b)*c")
    follower._matcher.try_consume_tokens([])
    broken = Broken(follower._matcher)
    follower._matcher = broken
    assert texts(follower.allowed([], ids("a"))[0]) == {"<|end|>"}
    assert follower.failure == "too much work"


def test_a_limit_met_along_the_drafts_is_no_failure_yet():
    follower = matcher("regex", "(a|b)*c")
    expected = follower.allowed([], [])
    follower._matcher = Broken(follower._matcher, after=1)
    masks = follower.allowed([], [*ids("a"), *ids("b")])
    assert np.array_equal(masks, expected), "the query behind it does not count"
    assert follower.failure == ""
    assert len(follower.allowed(ids("a"), ids("b"))) == 2


class Broken:
    """Meets a limit once it has consumed so many tokens."""

    def __init__(self, matcher, after: int = 0) -> None:
        self._matcher, self._after, self._consumed_count = matcher, after, 0

    def try_consume_tokens(self, tokens):
        self._consumed_count += len(tokens)
        return self._matcher.try_consume_tokens(tokens)

    def compute_bitmask(self):
        return self._matcher.compute_bitmask()

    def is_error(self):
        return self._consumed_count >= self._after

    def get_error(self):
        return "too much work"


def test_the_oldest_compiled_grammar_is_forgotten(monkeypatch):
    made = Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset({END}))
    monkeypatch.setattr(grammar_module, "COMPILED_MAX", 2)
    for text in ("a", "b", "a", "c"):
        made.matcher(Grammar("regex", text))
    assert [one.text for one in made._compiled] == ["a", "c"]


def test_without_the_package_or_an_end_it_is_said(monkeypatch):
    with pytest.raises(BadInput, match="end id"):
        Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset())
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unavailable, match="llguidance"):
        Grammars(tokenizer(), vocabulary=VOCABULARY, ends=frozenset({END}))
