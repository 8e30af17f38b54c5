"""DeepSeek-V3.2's replies: reasoning, content and DSML calls out of a stream of text.

    reasoning</think>content

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls><｜end▁of▁sentence｜>

A machine of five states. In each, the marks that can end it are known; text before the first mark
is given out at once, except an end that may still become one (`ess.models.marks`). A string value
streams, escaped as JSON; any other value is held to its end, because only then is it known to be
JSON. White space between tags is not significant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from ess.models.chat.dsml import (
    CALLS,
    CALLS_END,
    END,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    THINK_END,
    write_json,
)
from ess.models.chat.reply import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Flaw,
    Reasoning,
)
from ess.models.marks import first_mark, held_chars

# With and without the blank line that the format puts before the block.
_CALLS_MARKS: Final = ("\n\n" + CALLS, CALLS)
# No ">" inside a name: then the first ">" decides, in whatever pieces a tag arrives.
_NAME: Final = r' name="([^">]{0,512})"'
_INVOKE: Final = re.compile(re.escape(INVOKE) + _NAME + ">")
_PARAMETER: Final = re.compile(re.escape(PARAMETER) + _NAME + ' string="(true|false)">')
_TAG_CHARS_MAX: Final = 1024


class DeepSeekParser:
    """The reply to one prompt. `thinking` as in the prompt: it ended with `<think>`."""

    def __init__(self, *, thinking: bool) -> None:
        self._state: Callable[[], bool] = self._reasoning if thinking else self._content
        self._text = ""
        self._events: list[Event] = []
        self._call = -1
        self._parameter_count = 0
        self._is_string = False

    def push(self, text: str) -> list[Event]:
        self._text += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The text ended. Inside a call that is a flaw: the reply was cut short."""
        if self._state in (self._reasoning, self._content):
            self._say(self._text)
        elif self._state not in (self._ignored, self._after_calls):
            self._events.append(Flaw("the reply ends inside a tool call"))
        self._text, self._state = "", self._ignored
        return self._take()

    def _take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _say(self, text: str) -> None:
        if text:
            thinking = self._state == self._reasoning
            self._events.append(Reasoning(text) if thinking else Content(text))

    def _up_to(self, *marks: str) -> str | None:
        """Say the text before the first mark and drop both; None if no mark is complete yet."""
        found = first_mark(self._text, marks)
        cut = len(self._text) - held_chars(self._text, marks) if found is None else found[0]
        self._say(self._text[:cut])
        if found is None:
            self._text = self._text[cut:]
            return None
        self._text = self._text[cut + len(found[1]) :]
        return found[1]

    # The states: each consumes what it can and is True if there may be more to do.

    def _reasoning(self) -> bool:
        mark = self._up_to(THINK_END, END, *_CALLS_MARKS)
        return mark is not None and self._enter(self._content if mark == THINK_END else mark)

    def _content(self) -> bool:
        mark = self._up_to(END, *_CALLS_MARKS)
        return mark is not None and self._enter(mark)

    def _enter(self, state: Callable[[], bool] | str) -> bool:
        if isinstance(state, str):
            state = self._ignored if state == END else self._between_calls
        self._state = state
        return True

    def _between_calls(self) -> bool:
        """After the block's tag or a call: another call, or the end of the block."""
        if (tag := self._tag(_INVOKE)) is not None:
            self._call += 1
            self._parameter_count = 0
            self._events.append(CallBegin(self._call, tag[1]))
            return self._enter(self._between_parameters)
        if self._literal(CALLS_END):
            return self._enter(self._after_calls)
        return self._wait_for(INVOKE, CALLS_END)

    def _between_parameters(self) -> bool:
        if (tag := self._tag(_PARAMETER)) is not None:
            opening = "{" if self._parameter_count == 0 else ", "
            self._parameter_count += 1
            self._is_string = tag[2] == "true"
            quote = '"' if self._is_string else ""
            self._argue(f"{opening}{write_json(tag[1])}: {quote}")
            return self._enter(self._value)
        if self._literal(INVOKE_END):
            self._argue("{}" if self._parameter_count == 0 else "}")
            self._events.append(CallEnd(self._call))
            return self._enter(self._between_calls)
        return self._wait_for(PARAMETER, INVOKE_END)

    def _value(self) -> bool:
        at = self._text.find(PARAMETER_END)
        if self._is_string:
            held = held_chars(self._text, (PARAMETER_END,)) if at < 0 else len(self._text) - at
            cut = len(self._text) - held
            self._argue(write_json(self._text[:cut])[1:-1])
            self._text = self._text[cut:]
        if at < 0:
            return False
        value, _, self._text = self._text.partition(PARAMETER_END)
        self._argue('"' if self._is_string else _as_json(value))
        return self._enter(self._between_parameters)

    def _after_calls(self) -> bool:
        """Nothing follows the block but the end."""
        if not self._text.strip():
            return False
        return self._enter(self._ignored) if self._literal(END) else self._wait_for(END, END)

    def _ignored(self) -> bool:
        self._text = ""
        return False

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._call, text))

    def _tag(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._text = self._text.lstrip()
        found = pattern.match(self._text)
        if found is not None:
            self._text = self._text[found.end() :]
        return found

    def _literal(self, text: str) -> bool:
        self._text = self._text.lstrip()
        found = self._text.startswith(text)
        self._text = self._text.removeprefix(text)
        return found

    def _wait_for(self, *openings: str) -> bool:
        """Nothing matched: wait if the text may still become one of these tags, else give up and
        let the rest through as content."""
        for opening in openings:
            is_open = self._text.startswith(opening) and ">" not in self._text
            if opening.startswith(self._text) or (is_open and len(self._text) < _TAG_CHARS_MAX):
                return False
        self._events.append(Flaw(f"a tool call lacks {openings[0]} or {openings[1]}"))
        return self._enter(self._content)


def _as_json(text: str) -> str:
    """A value that claims to be JSON; one that is not becomes a string, so the whole stays JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return write_json(text)
    return text


def _refuse(text: str) -> None:
    raise ValueError(text)
