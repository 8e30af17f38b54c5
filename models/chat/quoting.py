"""What a client writes stays text: it cannot write the special tokens that a format is made of.

A template makes one string of its own marks and of what clients wrote. If a client wrote such a
mark, `<|end|>` say, both look alike there. So a separator that no client wrote is put into the
client's marks before the rendering, behind their first character, and behind what ends like the
beginning of a mark: formats join texts, the parts of a content for example, and the next one could
be the rest. In the rendered text whatever still is a mark is the template's; the rest is encoded as
the text it is, without the separators (`Tokenizer.encode_quoted`). A conversation in which no
client wrote a mark, or the beginning of one at the end of a text, is rendered and encoded as it
came.

Limits: a mark of a single character cannot be split; one that begins with a letter or a figure is
split only where a single text has all of it, since roles and types end with these too; a template
that takes contents apart by their length sees a longer one. A text that a format reads as JSON must
come as its values, since escapes hide marks (`ess.models.chat.messages.with_values`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

SEPARATORS: Final = (0xF0000, 0xFFFFD)
Written = TypeVar("Written")


class Quoting:
    """How the marks in something written by clients are split; with none there it changes nothing
    and `separator` is empty."""

    def __init__(self, written: Any, marks: frozenset[str]) -> None:
        texts = list(_strings(written))
        text = "\n".join(texts)
        known = [mark for mark in marks if len(mark) > 1]
        self._marks = [mark for mark in known if mark in text]
        self._beginnings = Beginnings(known)
        needs = bool(self._marks) or any(map(self._beginnings.end, texts))
        free = (chr(code) for code in range(*SEPARATORS) if chr(code) not in text)
        self.separator = next(free, "") if needs else ""

    def split(self, written: Written) -> Written:
        """The same, with every mark in it split."""
        return self._split(written) if self.separator else written

    def _split(self, written: Any) -> Any:
        if isinstance(written, str):
            for mark in self._marks:
                written = written.replace(mark, mark[0] + self.separator + mark[1:])
            return written + self.separator if self._beginnings.end(written) else written
        if isinstance(written, Mapping):
            return {self._split(key): self._split(value) for key, value in written.items()}
        if isinstance(written, (list, tuple)):
            return [self._split(item) for item in written]
        return written


class Beginnings:
    """Those of some marks, but for marks that begin with a letter or a figure."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = sorted(mark for mark in marks if not mark[0].isalnum())
        self._firsts = {mark[0] for mark in self._marks}
        self._longest = max(map(len, self._marks), default=0)

    def end(self, text: str) -> bool:
        """Whether the text ends with the beginning of a mark."""
        tail = text[-self._longest :] if self._longest else ""
        places = (at for at, char in enumerate(tail) if char in self._firsts)
        return any(self._begins(tail[at:]) for at in places)

    def _begins(self, text: str) -> bool:
        """Marks that begin with a text come right behind its place in their order."""
        place = bisect_left(self._marks, text)
        return place < len(self._marks) and self._marks[place].startswith(text)


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
