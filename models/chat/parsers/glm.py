"""GLM's replies: reasoning, content and calls in <tool_call> tags out of a stream of text.

    reasoning</think>content<tool_call>f<arg_key>city</arg_key><arg_value>Ulm</arg_value>
    <arg_key>days</arg_key><arg_value>3</arg_value></tool_call>

The text does not say whether a value is a string or JSON: the tool's schema does. A value whose
schema is a plain string streams as it is; any other is JSON if it reads as JSON of a type that the
schema allows, else a string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ess.models.chat.json_schemas import parameter_types
from ess.models.chat.parsers.stream import State, StreamParser
from ess.models.chat.reply import CallBegin, CallEnd
from ess.models.text.marks import first_mark

THINK_END: Final = "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The marks of calls. `outer`, if any, is around all calls of a reply, and `name_end`, if any,
    behind a call's name."""

    think: str = ""
    think_end: str = THINK_END
    call: str = CALL
    call_end: str = CALL_END
    name_end: str = ""
    key: str = KEY
    key_end: str = KEY_END
    value: str = VALUE
    value_end: str = VALUE_END
    outer: str = ""
    outer_end: str = ""


GLM: Final = Tags()
# The next turn's marks: a model that writes one has ended its own.
_ENDS: Final = ("<|user|>", "<|observation|>", "<|endoftext|>")
_NAME_CHARS_MAX: Final = 512


class GlmParser(StreamParser):
    """The reply to one prompt whose request offered `tools` (function descriptions)."""

    def __init__(
        self,
        *,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        tags: Tags = GLM,
        ends: tuple[str, ...] = _ENDS,
    ) -> None:
        self._tags = tags
        super().__init__(
            thinking=thinking,
            think_end=tags.think_end,
            ends=ends,
            calls=(tags.outer or tags.call,),
            in_calls=self._between_calls if tags.outer else self._call_name,
            think=tags.think,
        )
        self._strings = string_parameters(tools)
        self._types = parameter_types(tools)
        self._name = ""
        self._parameter = ""
        self._is_string = False

    def _quiet_states(self) -> tuple[State, ...]:
        return (self._ignored, self._after_call)

    def _between_calls(self) -> bool:
        """Within the outer tag: a call, or its end."""
        tags = self._tags
        if self._literal(tags.call):
            return self._enter(self._call_name)
        if self._literal(tags.outer_end):
            return self._enter(self._after_call)
        expected = tags.call, tags.outer_end
        return not self._may_become(*expected) and self._give_up(*expected)

    def _call_name(self) -> bool:
        """Up to the mark behind the name, or the first key or the end of the call, which stay."""
        tags = self._tags
        marks = tuple(filter(None, (tags.name_end, tags.key, tags.call_end)))
        first = first_mark(self._text, marks)
        if first is None or first[0] > _NAME_CHARS_MAX:
            too_long = len(self._text) > _NAME_CHARS_MAX + max(map(len, marks))
            return (first is not None or too_long) and self._give_up(*marks)
        self._name = self._text[: first[0]].strip()
        self._text = self._text[first[0] :].removeprefix(tags.name_end)
        self._call += 1
        self._parameter_count = 0
        self._events.append(CallBegin(self._call, self._name))
        return self._enter(self._between_parameters)

    def _between_parameters(self) -> bool:
        tags = self._tags
        if self._literal(tags.key):
            return self._enter(self._key)
        if self._literal(tags.call_end):
            self._argue("{}" if self._parameter_count == 0 else "}")
            self._events.append(CallEnd(self._call))
            return self._enter(self._between_calls if tags.outer else self._after_call)
        expected = tags.key, tags.call_end
        return not self._may_become(*expected) and self._give_up(*expected)

    def _key(self) -> bool:
        end = self._tags.key_end
        at = self._text.find(end)
        if at > _NAME_CHARS_MAX or (at < 0 and len(self._text) > _NAME_CHARS_MAX + len(end)):
            return self._give_up(end)
        if at < 0:
            return False
        name, _, self._text = self._text.partition(end)
        self._parameter = name.strip()
        self._is_string = (self._name, self._parameter) in self._strings
        self._name_parameter(self._parameter, is_string=self._is_string)
        return self._enter(self._before_value)

    def _before_value(self) -> bool:
        if self._literal(self._tags.value):
            return self._enter(self._value)
        return not self._may_become(self._tags.value) and self._give_up(self._tags.value)

    def _value(self) -> bool:
        types = self._types.get((self._name, self._parameter))
        done = self._value_up_to(self._tags.value_end, is_string=self._is_string, types=types)
        return done and self._enter(self._between_parameters)

    def _after_call(self) -> bool:
        """White space before another call is not content; anything else is."""
        if not self._text.strip():
            return False
        [call] = self._calls
        if self._literal(call):
            return self._enter(self._in_calls)
        return not self._may_become(call) and self._enter(self._content)

    def _may_become(self, *marks: str) -> bool:
        return any(mark.startswith(self._text) for mark in marks)


def string_parameters(tools: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """(tool, parameter) pairs whose schema says plainly "string"."""
    pairs = set()
    for tool in tools:
        schema = tool.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        for name, described in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(described, Mapping) and described.get("type") == "string":
                pairs.add((str(tool.get("name")), str(name)))
    return frozenset(pairs)
