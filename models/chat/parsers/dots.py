"""dots3's replies: reasoning that the model opens itself, content, calls in plain tags.

    <think>reasoning</think>content
    <dots_function_call>
    <invoke name="tide">
    <parameter name="city">Ulm</parameter>
    <parameter name="days">3</parameter>
    </invoke>
    </dots_function_call>

A value is a string unless the tool's schema says something else; then it is JSON if it reads as
JSON of a type that the schema allows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ess.models.chat.json_schemas import TEXT, Types, parameter_types
from ess.models.chat.parsers.tagged import TaggedParser, Tags

THINK, THINK_END = "<think>", "</think>"
CALLS, CALLS_END = "<dots_function_call>", "</dots_function_call>"
INVOKE, INVOKE_END = "<invoke", "</invoke>"
PARAMETER, PARAMETER_END = "<parameter", "</parameter>"
_TAGS: Final = Tags(
    closing=CALLS_END,
    invoke=INVOKE,
    invoke_end=INVOKE_END,
    parameter=PARAMETER,
    parameter_end=PARAMETER_END,
)


class DotsParser(TaggedParser):
    def __init__(self, *, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(
            _TAGS, thinking=False, think_end=THINK_END, ends=(), calls=(CALLS,), think=THINK
        )
        self._said = parameter_types(tools)

    def _is_text(self, tag: re.Match[str]) -> bool:
        return self._said.get((self._called, tag[1]), TEXT) == TEXT

    def _types_of(self, tag: re.Match[str]) -> Types | None:
        return self._said.get((self._called, tag[1]))

    def _after_calls(self) -> bool:
        """White space before another block is not content; anything else is."""
        if not self._text.strip():
            return False
        if self._literal(CALLS):
            return self._enter(self._between_calls)
        return not CALLS.startswith(self._text) and self._enter(self._content)
