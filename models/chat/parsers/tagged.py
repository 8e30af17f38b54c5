"""Replies whose calls are tags: of a block of calls, of each call in it, of each parameter.

    <block><invoke name="tide"><parameter name="city">Ulm</parameter></invoke></block>

White space between tags is not significant. A format says how its tags are written, whether a
parameter is a string, and what may follow a block.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from ess.models.chat.json_schemas import Types
from ess.models.chat.parsers.stream import State, StreamParser
from ess.models.chat.reply import CallBegin, CallEnd

# No ">" inside a name: then the first ">" decides, in whatever pieces a tag arrives.
_NAME: Final = r' name="([^">]{0,512})"'
_TAG_CHARS_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """`closing` ends a block of calls; `kind` is a pattern of what a parameter's tag has behind its
    name."""

    closing: str
    invoke: str
    invoke_end: str
    parameter: str
    parameter_end: str
    kind: str = ""


class TaggedParser(StreamParser, ABC):
    def __init__(
        self,
        tags: Tags,
        *,
        thinking: bool,
        think_end: str,
        ends: tuple[str, ...],
        calls: tuple[str, ...],
        think: str = "",
    ) -> None:
        super().__init__(
            thinking=thinking,
            think_end=think_end,
            ends=ends,
            calls=calls,
            in_calls=self._between_calls,
            think=think,
        )
        self._tags = tags
        self._invoke = re.compile(f"{re.escape(tags.invoke)}{_NAME}>")
        self._parameter = re.compile(f"{re.escape(tags.parameter)}{_NAME}{tags.kind}>")
        self._called = ""
        self._is_string = False
        self._types: Types | None = None

    @abstractmethod
    def _is_text(self, tag: re.Match[str]) -> bool:
        """Whether the parameter of this tag, of the call `_called`, is a string."""

    def _types_of(self, tag: re.Match[str]) -> Types | None:
        """The types that the parameter may have, where something is known of them."""
        return None

    @abstractmethod
    def _after_calls(self) -> bool:
        """Reads on after the end of a block."""

    def _quiet_states(self) -> tuple[State, ...]:
        return (self._ignored, self._after_calls)

    def _between_calls(self) -> bool:
        """After the block's tag or a call: another call, or the end of the block."""
        tags = self._tags
        if (tag := self._tag(self._invoke)) is not None:
            self._called = tag[1]
            self._call += 1
            self._parameter_count = 0
            self._events.append(CallBegin(self._call, tag[1]))
            return self._enter(self._between_parameters)
        if self._literal(tags.closing):
            return self._enter(self._after_calls)
        return self._await(tags.invoke, tags.closing)

    def _between_parameters(self) -> bool:
        tags = self._tags
        if (tag := self._tag(self._parameter)) is not None:
            self._is_string, self._types = self._is_text(tag), self._types_of(tag)
            self._name_parameter(tag[1], is_string=self._is_string)
            return self._enter(self._value)
        if self._literal(tags.invoke_end):
            self._argue("{}" if self._parameter_count == 0 else "}")
            self._events.append(CallEnd(self._call))
            return self._enter(self._between_calls)
        return self._await(tags.parameter, tags.invoke_end)

    def _value(self) -> bool:
        end = self._tags.parameter_end
        done = self._value_up_to(end, is_string=self._is_string, types=self._types)
        return done and self._enter(self._between_parameters)

    def _tag(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._text = self._text.lstrip()
        matched = pattern.match(self._text)
        if matched is not None:
            self._text = self._text[matched.end() :]
        return matched

    def _await(self, *openings: str) -> bool:
        """Waits while the text may still grow into a tag that begins so, and gives up where not."""
        is_open = ">" not in self._text and len(self._text) < _TAG_CHARS_MAX
        may_come = any(
            opening.startswith(self._text) or (is_open and self._text.startswith(opening))
            for opening in openings
        )
        return not may_come and self._give_up(*openings)
