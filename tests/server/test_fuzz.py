"""Whatever is sent, the answer is one of ours: no 5xx, no crash, nothing of us in an error."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections import Counter
from typing import Any

import msgspec
import pytest

from ess.server.dialects import schemas
from ess.server.process.service import Limits
from tests.server.harness import PacedEngine, Served, saying

KINDS = {
    "/v1/completions": schemas.CompletionAsk,
    "/v1/chat/completions": schemas.ChatAsk,
    "/v1/responses": schemas.ResponsesAsk,
    "/v1/responses/input_tokens": schemas.InputTokensAsk,
    "/v1/messages": schemas.MessagesAsk,
    "/v1/messages/count_tokens": schemas.CountTokensAsk,
    "/generate": schemas.GenerateAsk,
    "/inference/v1/generate": schemas.TokensAsk,
    "/tokenize": schemas.TokenizeAsk,
    "/detokenize": schemas.DetokenizeAsk,
    "/abort_request": schemas.AbortAsk,
}
LIMITS = Limits(running_max=64, waiting_max=4096, length_max=4096)


class Noise:
    """Bodies from one seed: right ones with some fields wrong, JSON of no shape, bytes of none."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def body(self, path: str) -> bytes:
        kind = self.random.random()
        if kind < 0.1:
            return self.random.randbytes(self.random.randrange(60))
        if kind < 0.2:
            return json.dumps(self.value(3)).encode()
        raw = json.dumps(self.struct(KINDS[path])).encode()
        if kind < 0.3:
            cut = self.random.randrange(len(raw) + 1)
            return raw[:cut] + self.random.randbytes(1 + self.random.randrange(3)) + raw[cut:]
        return raw

    def struct(self, kind: type) -> dict[str, Any]:
        share = self.random.random()
        fields = {}
        for field in msgspec.structs.fields(kind):
            if field.required or self.random.random() < share * 0.5:
                self.seen[f"{kind.__name__}.{field.name}"] += 1
                fields[field.encode_name] = self.field(field.name)
        return fields

    def field(self, name: str) -> Any:
        choose = self.random.choice
        likely: dict[str, list[Any]] = {
            "prompt": ["a", ["a", "b"], [5, 6], [[5], [6]], "x" * 500],
            "messages": [[{"role": "user", "content": "a"}], [{"role": "system"}]],
            "text": ["a", ["a", "b"]],
            "input": ["a", [{"role": "user", "content": "a"}], [{"type": "function_call"}]],
            "bad_words": [["a"]],
            "allowed_token_ids": [[5, 6]],
            "guided_choice": [["a", "b"]],
            "structured_outputs": [{"choice": ["a"]}, {"structural_tag": {"triggers": ["a"]}}],
            "input_ids": [[5, 6], [[5], [6]]],
            "token_ids": [[5, 6]],
            "tokens": [[5, 6], [[5]]],
            "model": ["test-model", "unknown"],
            "sampling_params": [
                *({}, {"max_tokens": 3}, {"max_new_tokens": 3}, [{"n": 2, "top_p": 0.5}, {"n": 2}]),
                [{"regex": "a"}, {"max_new_tokens": self.value(0), "bad_words": ["a"]}],
            ],
            "max_tokens": [1, 5],
            "n": [1, 2],
            "stop": ["e", ["e", "o"]],
            "stream": [True, False],
            "stream_options": [{"include_usage": True}],
            "tools": [[{"type": "function", "function": {"name": "f"}}]],
            "tool_choice": ["auto", "none", "required", {"type": "auto"}, {"type": "any"}],
            "thinking": [{"type": "enabled"}, {"type": "disabled"}],
            "system": ["a", [{"type": "text", "text": "a"}]],
            "stop_sequences": [["e"]],
            "output_config": [{"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}}],
            "logit_bias": [{"5": 1.5}],
            "stop_token_ids": [[1, 2]],
            "response_format": [{"type": "json_object"}, {"type": "text"}],
            "chat_template_kwargs": [{"thinking": True}],
        }
        if name in likely and self.random.random() < 0.8:
            return choose(likely[name])
        return self.value(2)

    def value(self, depth: int) -> Any:
        choose = self.random.choice
        plain = [None, True, False, 0, 1, -1, 2.5, 1e300, -0.0, 1 << 70, -(1 << 63), 4095, 4096]
        texts = ["", "a", "\x00", "é漢🙂", "\ud800", "5", "user", "x" * 300, self.word()]
        kind = self.random.randrange(4 if depth else 2)
        if kind == 0:
            return choose(plain)
        if kind == 1:
            return choose(texts)
        count = self.random.randrange(4)
        if kind == 2:
            return [self.value(depth - 1) for _ in range(count)]
        return {self.word(): self.value(depth - 1) for _ in range(count)}

    def word(self) -> str:
        names = ["role", "content", "type", "function", "name", "json_schema", "schema", "tools"]
        letters = "".join(self.random.choices(string.printable, k=self.random.randrange(8)))
        return self.random.choice([*names, letters])


async def sent(port: int, path: str, bodies: list[bytes]) -> list[tuple[int, bytes]]:
    """All bodies over one connection that stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    for body in bodies:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answers.append(await asyncio.wait_for(answer(reader), 120))
    writer.close()
    return answers


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    code, low = int(head[9:12]), head.lower()
    if b"content-length: " in low:
        length = int(low.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return code, await reader.readexactly(length)
    text = b""
    while size := int(await reader.readline(), 16):
        text += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return code, text


def storm(count: int, seed: int) -> None:
    noise = Noise(seed)
    answers: Counter[int] = Counter()
    with Served(PacedEngine(saying("one two three")), limits=LIMITS) as served:

        async def run() -> None:
            for _ in range(count // (len(KINDS) * 50)):
                answered = await asyncio.gather(
                    *(
                        sent(served.port, path, [noise.body(path) for _ in range(50)])
                        for path in KINDS
                    )
                )
                for code, text in (each for many in answered for each in many):
                    assert code in (200, 400, 404), text
                    answers[code] += 1
                    check(code, text)

        asyncio.run(run())
        assert served.service.link.open_count == 0, "a request was left behind"
        assert served.service.link.engine.state == "ready"
    assert min(answers[200], answers[400]) > count // 20, answers
    wanted = {f"{kind.__name__}.{f.name}" for kind in KINDS.values() for f in fields(kind)}
    missing = wanted - set(noise.seen)
    assert len(missing) <= len(wanted) * max(0, 5000 - count) / 50_000, missing


def fields(kind: type) -> tuple[Any, ...]:
    return msgspec.structs.fields(kind)


def check(code: int, text: bytes) -> None:
    for leak in (b"Traceback", b"/ess/", b"site-packages", b"object at 0x", b"msgspec."):
        assert leak not in text, text
    if code != 200:
        document = json.loads(text)
        error = document["error"]
        assert error["message"]
        ours = {"message", "type", "param", "code"}
        assert set(error) == ({"message", "type"} if "type" in document else ours)
    elif text.startswith((b"data: ", b"event: ")):
        assert text.endswith((b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n'))
    else:
        json.loads(text)


def test_three_thousand_bodies():
    storm(2100, seed=20261121)


@pytest.mark.slow
@pytest.mark.long
def test_a_hundred_thousand_bodies():
    for seed in range(10):
        storm(10_150, seed=seed)
