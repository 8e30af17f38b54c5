"""Every field of every dialect with values of any kind: each is served, or refused by name."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
from typing import Any

import msgspec
import pytest

from ess.server.dialects import schemas
from tests.server.harness import Served
from tests.support.few import few

SAMPLED = "sampling_params"
SAID: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
DIALECTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (schemas.CompletionAsk, {"prompt": "x", "max_tokens": 2}),
    "/v1/chat/completions": (schemas.ChatAsk, {"messages": SAID, "max_tokens": 2}),
    "/v1/responses": (schemas.ResponsesAsk, {"input": "x", "max_output_tokens": 16}),
    "/v1/messages": (schemas.MessagesAsk, {"messages": SAID, "max_tokens": 2}),
    "/generate": (schemas.GenerateAsk, {"text": "x", SAMPLED: {"max_new_tokens": 2}}),
    "/inference/v1/generate": (schemas.TokensAsk, {"token_ids": [5], SAMPLED: {"max_tokens": 2}}),
}
WITHIN = {schemas.GenerateAsk: schemas.SglangSampling, schemas.TokensAsk: schemas.TokenSampling}
UNREAD = {"x": "1e999", "y": "-1e999", "z": "NaN", "u": "Infinity", "v": "9" * 5000}
"""JSON that `json.dumps` does not write, or not so."""

VALUES = [
    *("null", "true", "false", "0", "1", "-1", "-0", "2", "5", "0.0", "1.0", "0.5", "1.5", "-0.5"),
    *("1e-320", "1e300", "-1e300", "2147483647", "2147483648", "-2147483649", "4294967296"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616"),
    *(
        '""',
        '"a"',
        '"1"',
        '"true"',
        '"null"',
        '"nan"',
        '"\\u0000"',
        '"\\ud800"',
        '"é😀"',
        '"%s"' % ("a" * 300),
    ),
    *("[]", "[null]", "[true]", "[0]", "[-1]", "[1.5]", '["a"]', '[""]', "[[]]", "[[1]]", "[{}]"),
    *('["a", 1]', "[4096]", "[1e300]", "{}", '{"a": 1}', '{"1": 1}', '{"1": 1e300}', '{"-1": 1}'),
    *(
        '{"1": null}',
        '{"4096": 1}',
        '{"1": "a"}',
        '{"type": "object"}',
        '{"": {}}',
        *UNREAD.values(),
    ),
]

GRID = list(itertools.product(DIALECTS, (1, 6)))


def fields_of(path: str) -> list[tuple[str, ...]]:
    """The ways to each field: those of the body, then those of its sampling parameters."""
    kind, _ = DIALECTS[path]
    names: list[tuple[str, ...]] = [(name,) for name in kind.__struct_fields__]
    if kind in WITHIN:
        names += [(SAMPLED, name) for name in WITHIN[kind].__struct_fields__]
    return names


def body_with(path: str, way: tuple[str, ...], value: str) -> bytes:
    """The dialect's plain body with this JSON under this field."""
    mark = "the value under test"
    body: dict[str, Any] = json.loads(json.dumps(DIALECTS[path][1]))
    inner = body if len(way) == 1 else body[way[0]]
    inner[way[-1]] = mark
    return json.dumps(body).replace(f'"{mark}"', value).encode()


def answered(to: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, str]:
    to.request("POST", path, body, {"Content-Type": "application/json"})
    answer = to.getresponse()
    return answer.status, answer.read().decode()


def wrong(way: tuple[str, ...], status: int, said: str) -> bool:
    """A refusal names the field, but for a body that is no JSON at all."""
    if status == 200:
        return '"error": {' in said
    if not 400 <= status < 500:
        return True
    message = json.loads(said)["error"]["message"]
    return way[-1] not in message and "is not JSON" not in message


@pytest.mark.parametrize(("path", "share"), few([(path, 6) for path in DIALECTS], all_of=GRID))
def test_any_value_is_served_or_refused_by_name(plain: Served, path: str, share: int) -> None:
    """Each field has every `share`-th of the values, and its neighbours have the others."""
    address = plain.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as to:
        failures = [
            f"{'.'.join(way)} = {value[:40]}: {status} {said[:200]}"
            for at, way in enumerate(fields_of(path))
            for value in VALUES[at % share :: share]
            for status, said in [answered(to, path, body_with(path, way, value))]
            if wrong(way, status, said)
        ]
        assert not failures, f"{len(failures)}:\n" + "\n".join(failures)
        assert answered(to, path, json.dumps(DIALECTS[path][1]).encode())[0] == 200


def test_integers_may_have_a_point(plain: Served) -> None:
    """As clients write them whose maps have one type for all numbers; texts are none. Numbers
    inside documents stay as they are."""
    wishes = {"max_tokens": 3.0, "n": 2.0, "top_k": -1.0, "stop_token_ids": [5.0], "seed": -7.0}
    body = {"prompt": [5.0, 6.0], **wishes, "temperature": 1, "guided_json": None}
    address = plain.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as to:
        status, text = answered(to, "/v1/completions", json.dumps(body).encode())
        assert status == 200, text
        document = json.loads(text)
        assert (len(document["choices"]), document["usage"]["completion_tokens"]) == (2, 6)
        deep = b'{"prompt": "x", "max_tokens": "3", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        assert "max_tokens" in answered(to, "/v1/completions", deep)[1], "all of it was decoded"
        ids_alone = json.dumps({"prompt": [[5.0], [6]], "max_tokens": 3}).encode()
        assert answered(to, "/v1/completions", ids_alone)[0] == 200
        form = {"type": "json_schema", "name": "x", "schema": {"const": 5.0, "minItems": 2.0}}
        given = {"input": "x", "max_output_tokens": 16.0, "text": {"format": form}}
        said = answered(to, "/v1/responses", json.dumps(given).encode())[1]
        assert '"max_output_tokens":16,' in said
        assert '"schema":{"const":5.0,"minItems":2.0}' in said, "a document is changed"
        grammar = plain.engine.adds[-1].sampling.grammar
        assert grammar is not None
        assert grammar.text == '{"const": 5.0, "minItems": 2}', "compilers want whole counts so"
        for value in ("3.5", "1e300", '"3"'):
            wrong_body = body_with("/v1/completions", ("max_tokens",), value)
            assert answered(to, "/v1/completions", wrong_body)[0] == 400, value
