"""A reply as it streams: what the model says becomes events, whatever the pieces it comes in.

Formats feed text in and get events out; the events of a text, joined, do not depend on how it was
cut. Arguments of a call stream as pieces of one JSON object. A model may write broken markup; that
is no error of the caller: from where it cannot be read it is given out as content, and the reply
carries a `flaw`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ess.models.chat.messages import Reply, ToolCall


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


@dataclass(frozen=True, slots=True)
class Flaw:
    sentence: str


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd | Flaw


class ReplyParser(Protocol):
    @property
    def held(self) -> int:
        """How many characters of what was pushed wait for what comes next."""
        ...

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def collect(events: Iterable[Event]) -> Reply:
    """The whole reply. A call that was never ended is left out: its arguments are half a JSON."""
    content, reasoning, flaw = "", "", None
    names: list[str] = []
    arguments: list[str] = []
    ended: set[int] = set()
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(_, name):
                names.append(name)
                arguments.append("")
            case CallArguments(index, text):
                arguments[index] += text
            case CallEnd(index):
                ended.add(index)
            case Flaw(sentence):
                flaw = flaw or sentence
    calls = tuple(ToolCall(name=names[i], arguments=arguments[i]) for i in sorted(ended))
    return Reply(content=content, reasoning=reasoning, tool_calls=calls, flaw=flaw)


def parse(parser: ReplyParser, text: str) -> Reply:
    return collect([*parser.push(text), *parser.finish()])


class PlainParser:
    """A format without markup: all of it is content."""

    held = 0

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []
