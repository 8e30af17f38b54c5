"""Replies whose calls are JSON (A.X-K2, and Mistral's): reasoning, content, calls.

    reasoning</think>content
    <tool_call>
    {"name": "tide", "arguments": {"city": "Ulm", "days": 3}}
    </tool_call>

    [THINK]reasoning[/THINK]content[TOOL_CALLS]tide[ARGS]{"city": "Ulm"}[TOOL_CALLS]now[ARGS]{}

A call is held until its object is whole: only then is it known to be one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from ess.errors import BadInput
from ess.models.chat.messages import write_json
from ess.models.chat.parsers.stream import State, StreamParser
from ess.models.chat.reply import CallBegin, CallEnd

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MISTRAL_CALL, MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
MISTRAL_THINK, MISTRAL_THINK_END = "[THINK]", "[/THINK]"
MISTRAL_END: Final = "</s>"
CALL_CHARS_MAX: Final = 1 << 17
_NAME_CHARS_MAX: Final = 512
# Whole strings, the beginning of one that is not, braces; and what is appended.
_PARTS: Final = r'"(?:[^"\\]|\\.)*"|"|[{}]|'


class HeldCalls(StreamParser):
    """Calls that are given out whole."""

    def _quiet_states(self) -> tuple[State, ...]:
        return (self._ignored, self._after_call)

    def _call_whole(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._call += 1
        self._events.append(CallBegin(self._call, name))
        self._argue(write_json(arguments))
        self._events.append(CallEnd(self._call))

    def _after_call(self) -> bool:
        """White space before another call is not content; anything else is."""
        if not self._text.strip():
            return False
        [call] = self._calls
        if self._literal(call):
            return self._enter(self._in_calls)
        return not call.startswith(self._text) and self._enter(self._content)


class HermesParser(HeldCalls):
    """One object for each call, in tags."""

    def __init__(self, *, thinking: bool) -> None:
        super().__init__(
            thinking=thinking,
            think_end=THINK_END,
            ends=(),
            calls=(CALL,),
            in_calls=self._object,
            think=THINK,
        )

    def _object(self) -> bool:
        try:
            parsed = _object_at(self._text, CALL_END)
        except (ValueError, RecursionError):
            return self._give_up("an object")
        if parsed is None:
            return len(self._text) > CALL_CHARS_MAX and self._give_up("an object")
        rest = self._text[parsed[1] :].lstrip()
        if not rest.startswith(CALL_END):
            return not CALL_END.startswith(rest) and self._give_up(CALL_END)
        call = _call(parsed[0])
        if call is None:
            return self._give_up("an object with a name and arguments")
        self._text = rest.removeprefix(CALL_END)
        self._call_whole(*call)
        return self._enter(self._after_call)


class MistralParser(HeldCalls):
    """A call's name, then an object, up to the next call or the end of the reply."""

    def __init__(self) -> None:
        super().__init__(
            thinking=False,
            think_end=MISTRAL_THINK_END,
            ends=(MISTRAL_END,),
            calls=(MISTRAL_CALL,),
            in_calls=self._name,
            think=MISTRAL_THINK,
        )
        self._called = ""

    def _name(self) -> bool:
        at = self._text.find(MISTRAL_ARGS)
        if at < 0 or at > _NAME_CHARS_MAX:
            too_long = len(self._text) > _NAME_CHARS_MAX + len(MISTRAL_ARGS)
            return too_long and self._give_up(MISTRAL_ARGS)
        name, _, self._text = self._text.partition(MISTRAL_ARGS)
        self._called = name.strip()
        return self._enter(self._arguments)

    def _arguments(self) -> bool:
        """An object ends at the first closing brace up to which the text is an object."""
        try:
            parsed = _object_at(self._text, MISTRAL_CALL)
        except (ValueError, RecursionError):
            return self._give_up("an object of arguments")
        if parsed is None:
            return len(self._text) > CALL_CHARS_MAX and self._give_up("an object of arguments")
        self._text = self._text[parsed[1] :]
        self._call_whole(self._called, parsed[0])
        return self._enter(self._after_call)

    def _after_call(self) -> bool:
        if self._literal(MISTRAL_END):
            return self._enter(self._ignored)
        is_half = self._text and MISTRAL_END.startswith(self._text)
        return not is_half and super()._after_call()


def _call(written: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The name and arguments of a call, if this is one."""
    name, arguments = written.get("name"), written.get("arguments", {})
    is_call = isinstance(name, str) and isinstance(arguments, dict)
    return (str(name), arguments) if is_call else None


def _refuse(text: str) -> NoReturn:
    raise BadInput(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _object_at(text: str, stop: str) -> tuple[dict[str, Any], int] | None:
    """The object that the text is or begins with, and where it ends; None if it is not whole yet.
    BadInput if it will never be one: also where `stop` stands in it, outside of its strings."""
    bare = text.lstrip()
    if bare[:1] not in ("", "{"):
        raise BadInput("what a call begins with is no JSON object")
    depth, begin = 0, len(text) - len(bare)
    for part in re.finditer(_PARTS + re.escape(stop), text[begin:], re.DOTALL):
        if part[0] == '"':
            return None
        if part[0] == stop:
            raise BadInput("a call ends before its JSON object does")
        depth += {"{": 1, "}": -1}.get(part[0], 0)
        if part[0] == "}" and depth == 0:
            end = begin + part.end()
            return json.loads(text[begin:end], parse_constant=_refuse, parse_float=_finite), end
    return None
