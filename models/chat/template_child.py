"""Renders one chat template in a process of its own. Run by path; imports nothing of ESS.

A template is a program from the checkpoint. Jinja's sandbox keeps it from Python's objects, but not
from running for ever or from asking for a terabyte of text. So it runs here, where memory
and processor time are limited by the system, which ends this process.

    in:  8 bytes length, then JSON {"source", "seconds"} once, then {"names"} for each rendering
    out: 8 bytes length, then JSON {"text": ...} or {"error": ...}
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any, BinaryIO

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES_MAX = 512 << 20
TEXT_CHARS_MAX = 16 << 20


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    prefix = stream.read(8)
    if len(prefix) < 8:
        return None
    asked: dict[str, Any] = json.loads(stream.read(int.from_bytes(prefix, "little")))
    return asked


def send(stream: BinaryIO, answer: dict[str, str]) -> None:
    raw = json.dumps(answer).encode()
    stream.write(len(raw).to_bytes(8, "little") + raw)
    stream.flush()


def to_json(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Generation(Extension):
    """{% generation %} marks what an assistant says, for training; here it changes nothing."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(sentence: str) -> str:
    raise TemplateError(sentence)


def now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face templates expect it."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = now
    return sandbox


def render(template: Any, names: dict[str, Any]) -> dict[str, str]:
    try:
        text = template.render(names)
    except MemoryError:
        return {"error": f"needs more than {MEMORY_BYTES_MAX >> 20} MiB"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if len(text) > TEXT_CHARS_MAX:
        return {"error": f"makes {len(text):,} characters; the bound is {TEXT_CHARS_MAX:,}"}
    return {"text": text}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = receive(requests)
    if first is None:
        return
    signal.setitimer(signal.ITIMER_PROF, first["seconds"])
    try:
        template = environment().from_string(first["source"])
    except Exception as error:
        send(answers, {"error": f"{type(error).__name__}: {str(error)[:300]}"})
        return
    send(answers, {"text": ""})
    signal.setitimer(signal.ITIMER_PROF, 0)
    while (request := receive(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, first["seconds"])
        send(answers, render(template, request["names"]))
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
