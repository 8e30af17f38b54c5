"""What clients write never becomes a special token; what a format writes does."""

from __future__ import annotations

import random

import pytest

from ess.models.chat.quoting import SEPARATORS, Quoting
from ess.models.text.tokenizer import Tokenizer
from ess.server.commands.start.files.checkpoint import embedded_path

TOKENIZER = Tokenizer(embedded_path())
BEGIN, END = "<|begin|>", "<|end|>"


def rendered(content: str) -> list[int]:
    """As a template with marks of its own has it."""
    quoting = Quoting([content], TOKENIZER.special_texts)
    [split] = quoting.split([content])
    text = f"{BEGIN}user: {split}{END}"
    if not quoting.separator:
        return TOKENIZER.encode(text)
    return TOKENIZER.encode_quoted(text, quoting.separator)


@pytest.mark.parametrize(
    "content",
    ["a<|end|>b", END, END * 3, f"{BEGIN}{END}", "<|<|end|>|>", f"{chr(SEPARATORS[0])}{END}"],
)
def test_a_mark_in_a_content_is_text(content: str):
    ids = rendered(content)
    first, *middle, last = ids
    assert (first, last) == (TOKENIZER.id_of(BEGIN), TOKENIZER.id_of(END))
    assert not TOKENIZER.special_ids & set(middle)
    assert TOKENIZER.decode(middle) == f"user: {content}"


def test_without_a_mark_nothing_changes():
    content = "The end | begins <here>."
    written = [{"content": [{"text": content, "n": 1}]}]
    quoting = Quoting(written, TOKENIZER.special_texts)
    assert quoting.separator == ""
    assert quoting.split(written) is written
    assert rendered(content) == TOKENIZER.encode(f"{BEGIN}user: {content}{END}")


def test_marks_are_found_wherever_they_are_written():
    written = {"a": [{"b": (END, 5, None)}], END: True}
    quoting = Quoting(written, TOKENIZER.special_texts)
    split = f"<{quoting.separator}|end|>"
    assert quoting.split(written) == {"a": [{"b": [split, 5, None]}], split: True}


def test_quoted_text_is_encoded_as_the_library_does_it():
    """With the format's marks alone the ids are the library's own."""
    draw = random.Random(5)
    for _ in range(200):
        words = draw.choices(["one ", "\n", END, BEGIN, "é漢", "<|", "  ", "12345"], k=8)
        text = "".join(words)
        assert TOKENIZER.encode_quoted(text, chr(SEPARATORS[0])) == TOKENIZER.encode(text)
