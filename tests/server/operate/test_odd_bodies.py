"""Right bodies that are written oddly: JSON as no client writes it, at every door that reads one.

Keys come twice, numbers have hundreds of digits or are none, texts are escaped anywhere, lists and
schemas are deep, long, or lead back to themselves. Some bodies are long enough for a text process.
The answer is 200, or a 400 in our words, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from ess.models.chat.styles import DeepSeekStyle
from ess.server.process.bounds import LOOP_BODY_BYTES, SHORT_BODY_BYTES
from tests.server.harness import PacedEngine, Served, saying
from tests.server.test_fuzz import KINDS, LIMITS, Noise, check, sent

SPACE = ["", "", "", " ", "\n\t", "\r\n  "]
NUMBERS = [
    *("-0", "0.0", "1e0", "1E+2", "-1e-400", "1e400", "9" * 400, "0." + "1" * 400, "1" + "0" * 18),
    *("9223372036854775807", "18446744073709551616", "NaN", "-Infinity", "01", "+1", "0x10", "1."),
]
TEXTS = ["\\u0000", "\\ud83d\\ude42", "\\ud800", "\\udc00\\ud800", "\\/", "é漢🙂", "\\u0061", "\\x"]


class Odd:
    """Writes a document as JSON: with `share` of the places written oddly."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._noise = Noise(seed)
        self._share = 0.0

    def body(self, path: str) -> bytes:
        """A body that a server reads: a longer one gets a 413, which ends its connection."""
        while len(drawn := self._drawn(path)) > LIMITS.body_max:
            pass
        return drawn

    def _drawn(self, path: str) -> bytes:
        self._share = self._random.choice((0.0, 0.02, 0.1, 0.3))
        document = self._noise.struct(KINDS[path])
        if self._random.random() < 0.3:
            document |= self._grown()
        pad = self._random.choice((0, 0, 0, 0, LOOP_BODY_BYTES, SHORT_BODY_BYTES))
        return self._written(document).encode() + b" " * pad

    def _grown(self) -> dict[str, Any]:
        """Parts that are long, deep, or lead back to themselves."""
        schema = {"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        deep: Any = {"type": "string"}
        for _ in range(self._random.choice((3, 60, 120))):
            deep = {"type": "object", "properties": {"a": deep}}
        chosen = self._random.choice((*schema, deep, {"enum": ["x"] * 3000}, {"allOf": [{}] * 500}))
        tool = {"type": "function", "function": {"name": "f", "parameters": chosen}}
        flat = {"type": "function", "name": "f", "parameters": chosen, "input_schema": chosen}
        count = self._random.choice((1, 3, 128, 129))
        return self._random.choice(
            (
                {"tools": [tool] * count, "tool_choice": "required"},
                {"tools": [{**flat, "type": self._random.choice(("function", "custom"))}] * count},
                {"guided_json": chosen},
                {"response_format": {"type": "json_schema", "json_schema": {"schema": chosen}}},
                {"text": {"format": {"type": "json_schema", "schema": chosen}}},
                {"output_config": {"format": {"type": "json_schema", "schema": chosen}}},
                {"stop": [f"s{at}" for at in range(count * 10)]},
                {"regex": "(a{1,999}){1,999}" * count},
                {"bad_words": ["é" * 200] * count * 3},
                {"logit_bias": {f"{at}": at for at in range(count * 9)}},
                {"metadata": {f"k{at}": "v" for at in range(count * 300)}},
                {"sampling_params": {"regex": "[" * count, "n": count}},
            )
        )

    def _is_odd(self) -> bool:
        return self._random.random() < self._share

    def _written(self, value: Any, level: int = 0) -> str:
        gap = self._random.choice(SPACE)
        match value:
            case dict():
                parts = [
                    f"{self._text(key)}{gap}:{self._written(v, level + 1)}"
                    for key, v in value.items()
                ]
                if parts and level == 0 and self._is_odd():
                    parts += self._random.choices(parts, k=self._random.choice((1, 3, 50)))
                if level < 2 and self._is_odd():
                    parts.append(f"{self._text('ключ')}:{self._depth()}")
                return f"{gap}{{{(',' + gap).join(parts)}}}"
            case list() | tuple():
                return f"[{gap}{f'{gap},'.join(self._written(v, level + 1) for v in value)}]"
            case bool() | None:
                return json.dumps(value)
            case int() | float() if self._is_odd():
                return self._random.choice(NUMBERS)
            case str():
                return self._text(value)
        return json.dumps(value)

    def _text(self, text: str) -> str:
        if not self._is_odd():
            return json.dumps(text, ensure_ascii=self._random.random() < 0.5 or not text.isascii())
        return f'"{self._random.choice(TEXTS)}{json.dumps(text)[1:-1]}"'

    def _depth(self) -> str:
        depth = self._random.choice((5, 200, 5000))
        return "[" * depth + "]" * (depth - self._random.choice((0, 0, 1)))


def storm(count: int, seed: int) -> None:
    odd, answers = Odd(seed), Counter[int]()
    engine = PacedEngine(saying("one two three"))
    with Served(engine, style=DeepSeekStyle(), is_marked=True, limits=LIMITS) as served:

        async def run() -> None:
            for _ in range(count // (len(KINDS) * 20)):
                every = [
                    sent(served.port, path, [odd.body(path) for _ in range(20)]) for path in KINDS
                ]
                for code, text in (each for many in await asyncio.gather(*every) for each in many):
                    assert code in (200, 400, 404), text
                    answers[code] += 1
                    check(code, text)

        asyncio.run(run())
        assert served.service.link.open_count == 0, "a request was left behind"
        assert served.service.texts.reading_count == 0
        assert served.service.link.engine.state == "ready"
    assert min(answers[200], answers[400]) > count // 20, answers


def test_hundreds_of_odd_bodies():
    storm(300, seed=20261127)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_thousands_of_odd_bodies(seed: int):
    storm(2_000, seed)
