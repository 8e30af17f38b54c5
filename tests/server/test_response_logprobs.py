"""Log probabilities of a response's text: those of the tokens that it is made of, and no others."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from msgspec.json import decode

from ess.engine.tokens.chance import Chance
from ess.models.chat.parsers.deepseek_v32 import DeepSeekParser
from ess.models.chat.reply import Content
from ess.server.dialects.logprobs import chat_entries
from ess.server.dialects.routes.openai_responses import ResponseWriter
from ess.server.dialects.scored_reply import ScoredParser
from tests.server.harness import TOKENIZER, Served, until
from tests.server.test_responses import TOOLS, create
from tests.server.tool_calls import CALLS

LOGPROBS = {"include": ["message.output_text.logprobs"]}
THINKING = {"tools": TOOLS, "reasoning": {"effort": "low"}}


def entries_of(response: Any) -> list[dict[str, Any]]:
    [message] = [item for item in response.output if item.type == "message"]
    return [entry.model_dump() for entry in message.content[0].logprobs]


def joined(entries: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


@pytest.mark.parametrize("asked", [LOGPROBS, {**LOGPROBS, "top_logprobs": 2}, {"top_logprobs": 2}])
def test_every_token_of_the_text_has_its_own(plain: Served, asked: dict[str, Any]):
    made = create(plain, **asked)
    entries = entries_of(made)
    assert joined(entries) == made.output_text == " It is noon."
    assert all(entry["logprob"] < 0 for entry in entries)
    top_count = asked.get("top_logprobs", 0)
    assert {len(entry["top_logprobs"]) for entry in entries} == {top_count}
    assert made.top_logprobs == top_count
    assert plain.engine.adds[-1].sampling.logprobs == top_count


def test_without_the_wish_there_are_none(plain: Served):
    assert entries_of(create(plain)) == []
    assert plain.engine.adds[-1].sampling.logprobs is None


def test_reasoning_marks_and_calls_have_none(calling: Served):
    made = create(calling, **LOGPROBS, **THINKING)
    assert joined(entries_of(made)).rstrip("\n") == made.output_text == "Let me look."


@pytest.mark.parametrize("asked", [{}, THINKING], ids=["quiet", "thinking"])
def test_a_stream_has_the_same(calling: Served, asked: dict[str, Any]):
    asked = {**asked, **LOGPROBS, "top_logprobs": 1}
    events = create(calling, **asked, stream=True)
    whole = entries_of(create(calling, **asked))
    assert entries_of(events[-1].response) == whole
    for kind in ("response.output_text.delta", "response.output_text.done"):
        told = [entry for event in events if event.type == kind for entry in event.logprobs]
        assert [entry.model_dump() for entry in told] == whole
    [done] = [event for event in events if event.type == "response.content_part.done"][-1:]
    assert [entry.model_dump() for entry in done.part.logprobs] == whole


def test_streams_that_end_together_write_one_long_event_in_a_turn_of_the_loop(
    plain: Served, monkeypatch: pytest.MonkeyPatch
):
    """With 20 likeliest for each of 4,000 tokens an event takes 15 ms, and each stream has four."""
    written, seen, is_over = ResponseWriter._written, [], []
    turn_count = 0

    def tick() -> None:
        nonlocal turn_count
        turn_count += 1
        if not is_over:
            asyncio.get_running_loop().call_soon(tick)

    def recorded(writer: ResponseWriter, event: dict[str, Any]) -> bytes:
        if not turn_count:
            tick()
        if event["type"].endswith((".done", ".completed")):
            seen.append((turn_count, event["type"]))
            assert plain.service.tally.document_count, "the drain does not know of this end"
        return written(writer, event)

    monkeypatch.setattr(ResponseWriter, "_written", recorded)
    count, before = 3, len(plain.engine.adds)
    plain.engine.hold()
    with ThreadPoolExecutor(count) as clients:
        asked = [clients.submit(create, plain, **LOGPROBS, stream=True) for _ in range(count)]
        until(lambda: len(plain.engine.adds) == before + count, "the requests")
        plain.engine.held.set()
        answers = [each.result() for each in asked]
    is_over.append(True)
    assert [answer[-1].type for answer in answers] == ["response.completed"] * count
    until(lambda: not plain.service.tally.document_count, "no end is left to be made")
    turns = [turn for turn, _ in seen]
    assert len(seen) == 4 * count
    assert len(set(turns)) == len(turns), f"events of one turn: {seen}"


def test_too_many_are_refused_by_their_name(plain: Served):
    with pytest.raises(openai.BadRequestError, match="top_logprobs is 99,") as caught:
        create(plain, **LOGPROBS, top_logprobs=99)
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize("step", [1, 9])
def test_a_character_cut_off_by_the_end_has_its_tokens(step: int):
    own = TOKENIZER.encode("a \U0001f642")[:-1]
    text = TOKENIZER.decode(own)
    assert text.endswith("\ufffd"), "the character is in several tokens"
    chances = [Chance(-place - 1.0, 1) for place in range(len(own))]
    scored = ScoredParser(DeepSeekParser(thinking=False), TOKENIZER, keep_special=False)
    heard, given = [], 0
    for at in range(0, len(own), step):
        known = TOKENIZER.decode(own[: at + step]).rstrip("\ufffd")
        heard += scored.push(text[given : len(known)], own[at : at + step], chances[at : at + step])
        given = len(known)
    heard += [*scored.push(text[given:], (), ()), *scored.finish()]
    assert "".join(event.text for event, _ in heard if isinstance(event, Content)) == text
    expected = [*chat_entries(TOKENIZER, own, chances)]
    assert [decode(entry) for _, entries in heard for entry in entries] == expected


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_those_of_the_content_however_the_reply_is_cut(seed: int):
    """Contents that look like pieces of marks, characters in several tokens; texts that lag behind
    their tokens, as they do while a stop string may come."""
    drawn = random.Random(seed)
    thought = drawn.choice(["", "t", "think <", "Ä thought</"])
    content = "".join(drawn.choices([*"think<>/｜Ä🙂 \n", "Let me", "</"], k=drawn.randint(1, 9)))
    content += "."
    marks = TOKENIZER.encode("</think>"), TOKENIZER.encode(CALLS)
    own = TOKENIZER.encode(content)
    tokens = [*TOKENIZER.encode(thought), *marks[0], *own, *(marks[1] if seed % 2 else [])]
    chances = [Chance(-place - 1.0, 1) for place in range(len(tokens))]
    text = TOKENIZER.decode(tokens)
    scored = ScoredParser(DeepSeekParser(thinking=True), TOKENIZER, keep_special=True)
    heard, at, given = [], 0, 0
    while at < len(tokens):
        end = min(len(tokens), at + drawn.randint(1, 4))
        known = TOKENIZER.decode(tokens[:end]).rstrip("�")
        until = max(given, len(known) - drawn.randint(0, 3))
        heard += scored.push(text[given:until], tokens[at:end], chances[at:end])
        at, given = end, until
    heard += [*scored.push(text[given:], (), ()), *scored.finish()]
    first = len(TOKENIZER.encode(thought)) + len(marks[0])
    expected = [*chat_entries(TOKENIZER, own, chances[first : first + len(own)])]
    said = [(event, entries) for event, entries in heard if isinstance(event, Content)]
    assert "".join(event.text for event, _ in said) == content
    assert [decode(entry) for _, entries in said for entry in entries] == expected
    assert all(not entries for event, entries in heard if not isinstance(event, Content))
