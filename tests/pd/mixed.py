"""Requests of every sort, and the parts of their answers that must not depend on which worker makes
the prompt.

Numbers are such as pass a router that reads floats in 32 bits.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from tests.support.routers import Answer, ask

MODEL: Final = "ess-embedded"
AT_ONCE: Final = 6
BACK_S: Final = 120.0
NO_WORKER: Final = re.compile(r"\bno\b[\w /]*\b(worker|server)s?\b", re.IGNORECASE)
SENTENCE: Final = (
    "The server is a process that answers when a client asks and a page of rows is stored on the"
    " host while the device keeps those that the indexer selects in each layer of the model"
)
WORDS: Final = tuple(SENTENCE.split())


@dataclass(frozen=True, slots=True)
class Asked:
    path: str
    body: Mapping[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def prompt_count(self) -> int:
        prompt = self.body.get("prompt")
        return len(prompt) if isinstance(prompt, list) else 1


def mixed(count: int) -> list[Asked]:
    """Short and long prompts, some with a beginning in common."""
    rng = random.Random(7)
    return [_asked(rng, number) for number in range(count)]


def _asked(rng: random.Random, number: int) -> Asked:
    prompt = " ".join(rng.choices(WORDS, k=rng.choice((3, 12, 30, 60))))
    if number % 5 == 0:
        prompt = " ".join(WORDS * 2) + " " + prompt
    body: dict[str, Any] = {"model": MODEL, "max_tokens": rng.randint(2, 7)}
    if number % 3 == 0:
        body |= {"temperature": 0.75, "seed": number, "top_p": 0.875}
    else:
        body |= {"temperature": 0}
    if number % 7 == 1:
        body["stop"] = [" the", "."]
    if number % 8 == 3:
        body["n"] = 2
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if number % 4 < 2:
        both = number % 16 == 4
        return Asked(
            "/v1/completions", {**body, "prompt": [prompt, "Rows are"] if both else prompt}
        )
    return Asked(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Of each choice its text and why it ended; how many tokens all had."""

    choices: tuple[tuple[int, str, str], ...]
    completion_tokens: int
    prompt_tokens: int


def result_of(asked: Asked, answer: Answer) -> Result:
    assert answer.status == 200, answer.text
    documents = answer.events if asked.streams else [answer.document]
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for document in documents:
        for choice in document["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + _text(choice)
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    usage = documents[-1]["usage"]
    choices = tuple((index, texts[index], ends[index]) for index in sorted(texts))
    return Result(choices, usage["completion_tokens"], usage["prompt_tokens"])


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("delta", choice.get("message", {})).get("content") or ""


def answered(url: str, body: object) -> Answer:
    """A router that a loaded machine has kept from its workers for seconds calls them unhealthy
    and takes them back; it is asked again."""
    deadline_s = time.monotonic() + BACK_S
    while has_no_worker(answer := ask(url, body)) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return answer


def has_no_worker(answer: Answer) -> bool:
    """Whether the router says so, not a worker of ours."""
    return answer.status == 503 and NO_WORKER.search(answer.text) is not None


def results(url: str, asked: Sequence[Asked]) -> list[Result]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda each: answered(url + each.path, dict(each.body)), asked))
    return [result_of(each, answer) for each, answer in zip(asked, answers, strict=True)]
