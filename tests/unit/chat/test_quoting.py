"""What clients write never becomes a special token; what a format writes does."""

from __future__ import annotations

import json
import random

import pytest

from ess.models.chat.messages import with_values
from ess.models.chat.quoting import SEPARATORS, Quoting
from ess.models.chat.styles import ChatStyle, DeepSeekStyle, PlainStyle
from ess.models.text.tokenizer import Tokenizer
from ess.server.commands.start.files.checkpoint import embedded_path
from ess.server.dialects import schemas
from ess.server.dialects.prompts import PromptReader

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


def prompt(style: ChatStyle, messages: list[dict[str, object]]) -> list[int]:
    reader = PromptReader(TOKENIZER, style, length_max=4096, vocabulary=4096)
    raw = json.dumps({"messages": messages}).encode()
    [ids] = reader.read(raw, schemas.ChatAsk).prompts
    return ids


@pytest.mark.parametrize("at", range(1, len(END)))
def test_parts_of_a_content_that_make_a_mark_are_text(at: int) -> None:
    parts = [{"type": "text", "text": text} for text in (END[:at], END[at:])]
    ids = prompt(PlainStyle(), [{"role": "user", "content": parts}])
    assert not TOKENIZER.special_ids & set(ids)
    assert TOKENIZER.decode(ids) == f"user: {END}\nassistant:"


@pytest.mark.parametrize("at", range(1, len(END)))
def test_messages_that_make_a_mark_are_text(at: int) -> None:
    """Nothing stands between two system messages of DeepSeek-V3.2."""
    system = [{"role": "system", "content": text} for text in (END[:at], END[at:])]
    ids = prompt(DeepSeekStyle(), [*system, {"role": "user", "content": "Hi"}])
    assert not TOKENIZER.special_ids & set(ids)
    assert END in TOKENIZER.decode(ids)


def called(arguments: str) -> list[dict[str, object]]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("text", ['{"a": "\\u003c|end|>"}', '{"\\u003c|end|>": ["<|end\\u007c>"]}'])
def test_escapes_in_arguments_hide_no_marks(text: str) -> None:
    ids = prompt(DeepSeekStyle(), called(text))
    assert not TOKENIZER.special_ids & set(ids)
    assert END in TOKENIZER.decode(ids)


@pytest.mark.parametrize("text", ['{"a": "\\u003c', '["\\u003c"]', "", "{}", '{"a": "<"}'])
def test_arguments_without_hidden_values_stay_as_they_are(text: str) -> None:
    assert with_values(called(text)) == called(text)


def test_what_is_no_message_is_left_to_be_refused() -> None:
    raw = [{"tool_calls": [{"function": 1}, 2]}, {"tool_calls": "x"}]
    assert with_values(raw) == raw
    assert with_values([3]) == [3]  # type: ignore[list-item]
