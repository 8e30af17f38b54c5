"""The part of reply parsing that formats share: a machine of states over a growing text.

In each state the marks that can end it are known. Text before the first mark is given out at once,
except an end that may still become a mark (`ess.models.text.marks`). A format adds the states of
its tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from ess.errors import BadInput
from ess.models.chat.json_schemas import Types, type_of
from ess.models.chat.messages import write_json
from ess.models.chat.reply import CallArguments, Content, Event, Flaw, Reasoning
from ess.models.text.marks import first_mark, held_chars

State = Callable[[], bool]


class StreamParser:
    """A state consumes what it can and is True if there may be more to do."""

    def __init__(
        self,
        *,
        thinking: bool,
        think_end: str,
        ends: tuple[str, ...],
        calls: tuple[str, ...],
        in_calls: State,
        think: str = "",
    ) -> None:
        """`ends` and `calls` are the marks of the reply's end and of tool calls, which are read
        by `in_calls`. `think` opens reasoning, where the prompt leaves that to the model."""
        self._state: State = self._reasoning if thinking else self._content
        self._text = ""
        self._events: list[Event] = []
        self._call = -1
        self._parameter_count = 0
        self._think_end = think_end
        self._ends = ends
        self._calls = calls
        self._in_calls = in_calls
        self._think = (think,) if think else ()

    @property
    def held(self) -> int:
        return len(self._text)

    def push(self, text: str) -> list[Event]:
        self._text += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The text ended. Inside a call that is a flaw: the reply was cut short."""
        if self._state in (self._reasoning, self._content):
            self._say(self._text)
        elif self._state in self._quiet_states():
            self._say(self._text.strip())
        else:
            self._events.append(Flaw("the reply ends inside a tool call"))
        self._text, self._state = "", self._ignored
        return self._take()

    def _quiet_states(self) -> tuple[State, ...]:
        """Where, outside of reasoning and content, the text may end without a flaw."""
        return (self._ignored,)

    def _take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _say(self, text: str) -> None:
        if text:
            thinking = self._state == self._reasoning
            self._events.append(Reasoning(text) if thinking else Content(text))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._call, text))

    def _enter(self, state: State) -> bool:
        self._state = state
        return True

    def _reasoning(self) -> bool:
        mark = self._say_up_to((self._think_end, *self._think, *self._ends, *self._calls))
        return mark is not None and self._after(mark)

    def _content(self) -> bool:
        mark = self._say_up_to((*self._think, *self._ends, *self._calls))
        return mark is not None and self._after(mark)

    def _ignored(self) -> bool:
        self._text = ""
        return False

    def _after(self, mark: str) -> bool:
        if mark == self._think_end:
            return self._enter(self._content)
        if mark in self._think:
            return self._enter(self._reasoning)
        return self._enter(self._ignored if mark in self._ends else self._in_calls)

    def _say_up_to(self, marks: tuple[str, ...]) -> str | None:
        """Say the text before the first mark and drop both; None if no mark is complete yet."""
        first = first_mark(self._text, marks)
        cut = len(self._text) - held_chars(self._text, marks) if first is None else first[0]
        self._say(self._text[:cut])
        if first is None:
            self._text = self._text[cut:]
            return None
        self._text = self._text[cut + len(first[1]) :]
        return first[1]

    def _value_up_to(self, mark: str, *, is_string: bool, types: Types | None = None) -> bool:
        """A parameter's value, of one of these `types`. A string streams, escaped as JSON; any
        other is held to its end, because only then is it known to be JSON. False if the mark is
        not there yet."""
        at = self._text.find(mark)
        if is_string:
            held = held_chars(self._text, (mark,)) if at < 0 else len(self._text) - at
            cut = len(self._text) - held
            self._argue(write_json(self._text[:cut])[1:-1])
            self._text = self._text[cut:]
        if at < 0:
            return False
        value, _, self._text = self._text.partition(mark)
        self._argue('"' if is_string else as_json(value, types))
        return True

    def _name_parameter(self, name: str, *, is_string: bool) -> None:
        opening = "{" if self._parameter_count == 0 else ", "
        quote = '"' if is_string else ""
        self._parameter_count += 1
        self._argue(f"{opening}{write_json(name)}: {quote}")

    def _literal(self, text: str) -> bool:
        """Skip white space, then take `text` if it is next."""
        self._text = self._text.lstrip()
        is_next = self._text.startswith(text)
        self._text = self._text.removeprefix(text)
        return is_next

    def _give_up(self, *expected: str) -> bool:
        """The markup is broken: the rest passes as content."""
        self._events.append(Flaw(f"a tool call lacks {' or '.join(expected)}"))
        return self._enter(self._content)


def as_json(text: str, types: Types | None = None) -> str:
    """A value that claims to be JSON. If it is not, it becomes a string, so that the whole stays
    JSON. So does a value whose type is not among `types`, if strings are."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return write_json(text)
    is_text = types is not None and "string" in types and type_of(value) not in types
    return write_json(text) if is_text else text


def _refuse(text: str) -> None:
    raise BadInput(f"{text} is not JSON")
