"""What a client writes stays text: it cannot write the special tokens that a format is made of.

A template makes one string of its own marks and of what clients wrote. If a client wrote such a
mark, `<|end|>` say, both look alike there. So a separator that no client wrote is put into the
client's marks before the rendering, behind their first character. In the rendered text whatever
still is a mark is the template's; the rest is encoded as the text it is, without the separators
(`Tokenizer.encode_quoted`). A conversation in which no client wrote a mark is rendered and encoded
as it came.

Limits: a mark of a single character cannot be split; a template that takes contents apart by their
length sees a longer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

SEPARATORS: Final = (0xF0000, 0xFFFFD)
Written = TypeVar("Written")


class Quoting:
    """How the marks in something written by clients are split; with none there it changes nothing
    and `separator` is empty."""

    def __init__(self, written: Any, marks: frozenset[str]) -> None:
        text = "\n".join(_strings(written))
        self._marks = [mark for mark in marks if len(mark) > 1 and mark in text]
        free = (chr(code) for code in range(*SEPARATORS) if chr(code) not in text)
        self.separator = next(free, "") if self._marks else ""

    def split(self, written: Written) -> Written:
        """The same, with every mark in it split."""
        return self._split(written) if self.separator else written

    def _split(self, written: Any) -> Any:
        if isinstance(written, str):
            for mark in self._marks:
                written = written.replace(mark, mark[0] + self.separator + mark[1:])
            return written
        if isinstance(written, Mapping):
            return {self._split(key): self._split(value) for key, value in written.items()}
        if isinstance(written, (list, tuple)):
            return [self._split(item) for item in written]
        return written


def _strings(written: Any) -> Iterator[str]:
    left = [written]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            left += value
