"""dots3's replies: reasoning that the model opens itself, content, calls in plain tags.

    <think>reasoning</think>content
    <dots_function_call>
    <invoke name="tide">
    <parameter name="city">Ulm</parameter>
    <parameter name="days">3</parameter>
    </invoke>
    </dots_function_call>

A value is a string unless the tool's schema says something else; then it is JSON if it reads so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ess.models.chat.reply import CallBegin, CallEnd
from ess.models.chat.stream import State, StreamParser

THINK, THINK_END = "<think>", "</think>"
CALLS, CALLS_END = "<dots_function_call>", "</dots_function_call>"
INVOKE, INVOKE_END = "<invoke", "</invoke>"
PARAMETER, PARAMETER_END = "<parameter", "</parameter>"
_NAME: Final = r' name="([^">]{0,512})">'
_INVOKE: Final = re.compile(re.escape(INVOKE) + _NAME)
_PARAMETER: Final = re.compile(re.escape(PARAMETER) + _NAME)
_TAG_CHARS_MAX: Final = 1024


class DotsParser(StreamParser):
    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(
            thinking=False,
            think_end=THINK_END,
            ends=(),
            calls=(CALLS,),
            in_calls=self._between_calls,
            think=THINK,
        )
        self._others = _other_parameters(tools)
        self._name = ""
        self._is_string = False

    def _quiet_states(self) -> tuple[State, ...]:
        return (self._ignored, self._after_calls)

    def _between_calls(self) -> bool:
        if (name := self._tag(_INVOKE)) is not None:
            self._name = name
            self._call += 1
            self._parameter_count = 0
            self._events.append(CallBegin(self._call, name))
            return self._enter(self._between_parameters)
        if self._literal(CALLS_END):
            return self._enter(self._after_calls)
        return not self._may_become(INVOKE, CALLS_END) and self._give_up(INVOKE, CALLS_END)

    def _between_parameters(self) -> bool:
        if (name := self._tag(_PARAMETER)) is not None:
            self._is_string = (self._name, name) not in self._others
            self._name_parameter(name, is_string=self._is_string)
            return self._enter(self._value)
        if self._literal(INVOKE_END):
            self._argue("{}" if self._parameter_count == 0 else "}")
            self._events.append(CallEnd(self._call))
            return self._enter(self._between_calls)
        return not self._may_become(PARAMETER, INVOKE_END) and self._give_up(PARAMETER, INVOKE_END)

    def _value(self) -> bool:
        done = self._value_up_to(PARAMETER_END, is_string=self._is_string)
        return done and self._enter(self._between_parameters)

    def _after_calls(self) -> bool:
        """White space before another block is not content; anything else is."""
        if not self._text.strip():
            return False
        if self._literal(CALLS):
            return self._enter(self._between_calls)
        return not CALLS.startswith(self._text) and self._enter(self._content)

    def _tag(self, pattern: re.Pattern[str]) -> str | None:
        self._text = self._text.lstrip()
        matched = pattern.match(self._text)
        if matched is None:
            return None
        self._text = self._text[matched.end() :]
        return matched[1]

    def _may_become(self, *openings: str) -> bool:
        """May the text still grow into a tag that begins so?"""
        is_open = ">" not in self._text and len(self._text) < _TAG_CHARS_MAX
        return any(
            opening.startswith(self._text) or (is_open and self._text.startswith(opening))
            for opening in openings
        )


def _other_parameters(tools: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """(tool, parameter) pairs whose schema says a type that is not plainly "string"."""
    pairs = set()
    for tool in tools:
        schema = tool.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        for name, described in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(described, Mapping) and described.get("type", "string") != "string":
                pairs.add((str(tool.get("name")), str(name)))
    return frozenset(pairs)
