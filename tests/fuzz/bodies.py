"""Target `bodies`: JSON for every POST route, right ones changed a little and JSON of no shape.

    {"path": "/generate", "raw": the body's bytes as Latin-1}

The answer is a good one, or an error of the declared form that blames the client or names what is
short. A stream ends with [DONE], of Anthropic's with message_stop. The engine has nothing left.
"""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

from ess.models.chat.styles import DeepSeekStyle
from tests.fuzz import values
from tests.fuzz.fuzzer import Finding, Value
from tests.fuzz.responses import Response, check_status
from tests.fuzz.rig import Rig
from tests.fuzz.served import ServedTarget
from tests.fuzz.shapes import Shapes

TOKENS = (
    *(
        '"',
        "\\",
        "\\u",
        "\\ud800",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "null",
        "NaN",
        "-Infinity",
        "1e999",
    ),
    *("[" * 2000, '{"a":' * 2000, "\x00", "\xff", "\xc3", "\xed\xa0\x80", "\xef\xbb\xbf", " " * 50),
    *('"stream":true,', '"n":3,', '"n":1e400,', '"prompt":"a",', "-0", "1" * 400, "//", "\ud83d"),
)
RAW_CHARS_MAX = 200_000
MESSAGES = "/v1/messages"
PAUSES = ("/pause", "/pause_generation")
RESUME = b"POST /resume HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
MESSAGE_ENDS = (b"event: message_stop", b"event: error")
LEAKS = (b"Traceback", b"site-packages", b"object at 0x", b"msgspec.", b'.py"', b"/ess/")


class Bodies(ServedTarget):
    name = "bodies"

    def make_rig(self) -> Rig:
        return Rig(style=DeepSeekStyle())

    def begin(self) -> None:
        self.shapes = Shapes(self.document)
        self.paths = sorted(self.shapes.roots)

    # ---- inputs

    def fresh(self, source: random.Random) -> Value:
        path = source.choice(self.paths)
        if source.random() < 0.05:
            raw = source.randbytes(source.randrange(60)).decode("latin-1")
            return {"path": path, "raw": raw}
        body = self.shapes.body(source, path) if source.random() < 0.9 else values.value(source, 4)
        if isinstance(body, dict) and source.random() < 0.3:
            name, item = self.shapes.foreign(source)
            body[name] = item
        return {"path": path, "raw": written(body)}

    def changed(self, source: random.Random, value: Value, other: Value) -> Value:
        path = value["path"] if source.random() < 0.95 else source.choice(self.paths)
        tree = parsed(value["raw"])
        if tree is None or source.random() < 0.12:
            raw = values.raw_changed(source, value["raw"], TOKENS)
        elif isinstance(tree, dict) and source.random() < 0.15:
            fresh = self.shapes.body(source, path)
            raw = written({**tree, **{name: fresh[name] for name in list(fresh)[:2]}})
        elif isinstance(tree, dict) and source.random() < 0.05:
            raw = doubled(source, tree)
        else:
            raw = written(values.changed(source, tree, parsed(other["raw"])))
        return {"path": path, "raw": raw[:RAW_CHARS_MAX]}

    # ---- running

    async def talk(self, value: Value) -> list[Response]:
        raw = value["raw"].encode("latin-1", "replace")
        head = f"POST {value['path']} HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        answers = [await self.exchange(head.encode() + raw)]
        if value["path"] in PAUSES:
            await self.exchange(RESUME)  # or requests that follow would wait
        return answers

    def judge(self, value: Value, answers: list[Response]) -> None:
        [answer] = answers
        path = self.place(value)
        check_status(answer, place=path)
        for leak in LEAKS:
            if leak in answer.body and leak.decode() not in value["raw"]:
                raise Finding(f"{leak.decode()!r} in an answer", path, repr(answer.body[:500]))
        if answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            ends = MESSAGE_ENDS if path.startswith(MESSAGES) else (b"data: [DONE]",)
            if not answer.body.strip().rpartition(b"\n\n")[2].startswith(ends):
                raise Finding("no end of a stream", path, repr(answer.body[-300:]))
        elif answer.status != 200:
            check_error(answer, path)
        else:
            json.loads(answer.body)


def check_error(answer: Response, path: str) -> None:
    """As the document says: Anthropic's form at Anthropic's paths, else ErrorAnswer."""
    try:
        document = json.loads(answer.body)
        error, of_messages = document["error"], path.startswith(MESSAGES)
        names = {"message", "type"} if of_messages else {"message", "type", "param", "code"}
        is_right = (
            set(error) == names
            and (not of_messages or set(document) == {"type", "error", "request_id"})
            and isinstance(error["message"], str)
            and isinstance(error["type"], str)
            and isinstance(error.get("param"), str | None)
            and bool(error["message"].strip() and error["type"])
        )
    except (ValueError, KeyError, TypeError):
        is_right = False
    if not is_right:
        raise Finding(f"an error of another form, {answer.status}", path, repr(answer.body[:500]))


def written(tree: Any) -> str:
    """Lone surrogates stay escapes, as a client can send them; some letters go as UTF-8."""
    text = json.dumps(tree)
    with contextlib.suppress(UnicodeEncodeError):
        if len(text) % 2:
            text = json.dumps(tree, ensure_ascii=False).encode().decode("latin-1")
    return text


def parsed(raw: str) -> Any:
    try:
        return json.loads(raw.encode("latin-1", "replace").decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def doubled(source: random.Random, tree: dict[str, Any]) -> str:
    """An object that says the same name twice."""
    name = source.choice([*tree, "stream"])
    return f'{{"{name}":{json.dumps(values.value(source, 2))},{written(tree)[1:]}'
