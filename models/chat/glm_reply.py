"""GLM's replies: reasoning, content and calls in <tool_call> tags out of a stream of text.

    reasoning</think>content<tool_call>f<arg_key>city</arg_key><arg_value>Ulm</arg_value>
    <arg_key>days</arg_key><arg_value>3</arg_value></tool_call>

The text does not say whether a value is a string or JSON: the tool's schema does. A value whose
schema is a plain string streams as it is; any other is JSON if it reads as JSON, else a string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ess.models.chat.reply import CallBegin, CallEnd
from ess.models.chat.stream import State, StreamParser
from ess.models.text.marks import first_mark

THINK_END: Final = "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
# The next turn's marks: a model that writes one has ended its own.
_ENDS: Final = ("<|user|>", "<|observation|>", "<|endoftext|>")
_NAME_CHARS_MAX: Final = 512


class GlmParser(StreamParser):
    """The reply to one prompt whose request offered `tools` (function descriptions)."""

    def __init__(self, *, thinking: bool, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(
            thinking=thinking,
            think_end=THINK_END,
            ends=_ENDS,
            calls=(CALL,),
            in_calls=self._call_name,
        )
        self._strings = _string_parameters(tools)
        self._name = ""
        self._is_string = False

    def _quiet_states(self) -> tuple[State, ...]:
        return (self._ignored, self._after_call)

    def _call_name(self) -> bool:
        """Up to the first key or the end of the call, which both stay."""
        first = first_mark(self._text, (KEY, CALL_END))
        if first is None or first[0] > _NAME_CHARS_MAX:
            too_long = len(self._text) > _NAME_CHARS_MAX + len(CALL_END)
            return (first is not None or too_long) and self._give_up(KEY, CALL_END)
        self._name = self._text[: first[0]].strip()
        self._text = self._text[first[0] :]
        self._call += 1
        self._parameter_count = 0
        self._events.append(CallBegin(self._call, self._name))
        return self._enter(self._between_parameters)

    def _between_parameters(self) -> bool:
        if self._literal(KEY):
            return self._enter(self._key)
        if self._literal(CALL_END):
            self._argue("{}" if self._parameter_count == 0 else "}")
            self._events.append(CallEnd(self._call))
            return self._enter(self._after_call)
        return not self._may_become(KEY, CALL_END) and self._give_up(KEY, CALL_END)

    def _key(self) -> bool:
        at = self._text.find(KEY_END)
        if at > _NAME_CHARS_MAX or (at < 0 and len(self._text) > _NAME_CHARS_MAX + len(KEY_END)):
            return self._give_up(KEY_END)
        if at < 0:
            return False
        name, _, self._text = self._text.partition(KEY_END)
        self._is_string = (self._name, name.strip()) in self._strings
        self._name_parameter(name.strip(), is_string=self._is_string)
        return self._enter(self._before_value)

    def _before_value(self) -> bool:
        if self._literal(VALUE):
            return self._enter(self._value)
        return not self._may_become(VALUE) and self._give_up(VALUE)

    def _value(self) -> bool:
        done = self._value_up_to(VALUE_END, is_string=self._is_string)
        return done and self._enter(self._between_parameters)

    def _after_call(self) -> bool:
        """White space before another call is not content; anything else is."""
        if not self._text.strip():
            return False
        if self._literal(CALL):
            return self._enter(self._call_name)
        return not self._may_become(CALL) and self._enter(self._content)

    def _may_become(self, *marks: str) -> bool:
        return any(mark.startswith(self._text) for mark in marks)


def _string_parameters(tools: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """(tool, parameter) pairs whose schema says plainly "string"."""
    pairs = set()
    for tool in tools:
        schema = tool.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        for name, described in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(described, Mapping) and described.get("type") == "string":
                pairs.add((str(tool.get("name")), str(name)))
    return frozenset(pairs)
