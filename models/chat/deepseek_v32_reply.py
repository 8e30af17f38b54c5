"""DeepSeek-V3.2's replies: reasoning, content and DSML calls out of a stream of text.

    reasoning</think>content

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls><｜end▁of▁sentence｜>

White space between tags is not significant.
"""

from __future__ import annotations

import re
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
)
from ess.models.chat.reply import CallBegin, CallEnd
from ess.models.chat.stream import State, StreamParser

# No ">" inside a name: then the first ">" decides, in whatever pieces a tag arrives.
_NAME: Final = r' name="([^">]{0,512})"'
_INVOKE: Final = re.compile(re.escape(INVOKE) + _NAME + ">")
_PARAMETER: Final = re.compile(re.escape(PARAMETER) + _NAME + ' string="(true|false)">')
_TAG_CHARS_MAX: Final = 1024


class DeepSeekParser(StreamParser):
    """The reply to one prompt. `thinking` as in the prompt: it ended with `<think>`. `opening` and
    `closing` are around a block of calls, also behind the blank line that the format has there."""

    def __init__(self, *, thinking: bool, opening: str = CALLS, closing: str = CALLS_END) -> None:
        self._closing = closing
        super().__init__(
            thinking=thinking,
            think_end=THINK_END,
            ends=(END,),
            calls=("\n\n" + opening, opening),
            in_calls=self._between_calls,
        )
        self._is_string = False

    def _quiet_states(self) -> tuple[State, ...]:
        return (self._ignored, self._after_calls)

    def _between_calls(self) -> bool:
        """After the block's tag or a call: another call, or the end of the block."""
        if (tag := self._tag(_INVOKE)) is not None:
            self._call += 1
            self._parameter_count = 0
            self._events.append(CallBegin(self._call, tag[1]))
            return self._enter(self._between_parameters)
        if self._literal(self._closing):
            return self._enter(self._after_calls)
        expected = INVOKE, self._closing
        return not self._may_become(*expected) and self._give_up(*expected)

    def _between_parameters(self) -> bool:
        if (tag := self._tag(_PARAMETER)) is not None:
            self._is_string = tag[2] == "true"
            self._name_parameter(tag[1], is_string=self._is_string)
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
        """Nothing follows the block but the end."""
        if self._literal(END):
            return self._enter(self._ignored)
        return not self._may_become(END) and self._give_up(END)

    def _tag(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self._text = self._text.lstrip()
        matched = pattern.match(self._text)
        if matched is not None:
            self._text = self._text[matched.end() :]
        return matched

    def _may_become(self, *openings: str) -> bool:
        """May the text still grow into a tag that begins so?"""
        is_open = ">" not in self._text and len(self._text) < _TAG_CHARS_MAX
        return any(
            opening.startswith(self._text) or (is_open and self._text.startswith(opening))
            for opening in openings
        )
