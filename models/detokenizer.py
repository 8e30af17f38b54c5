"""Ids to text as they come, and where to stop.

A character may be spread over tokens, and a token may hold parts of two characters. The text given
out is always whole characters; what waits is at most three bytes, the longest unfinished UTF-8
sequence, so the look-back is bounded whatever the ids are. Joined, the pieces equal
`Tokenizer.decode` of all ids: a byte sequence that can no longer become a character gives U+FFFD as
soon as that is certain.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ess.errors import BadInput
from ess.models.marks import first_mark, held_chars

if TYPE_CHECKING:
    from ess.models.tokenizer import Tokenizer

STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 256


class Detokenizer:
    """The text of one growing sequence of ids."""

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset[int]() if keep_special else tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The whole characters that these ids complete; often empty."""
        fresh = (self._tokenizer.bytes_of(i) for i in ids if i not in self._skipped)
        return self._decoder.decode(b"".join(fresh))

    def finish(self) -> str:
        """What an unfinished character at the end is worth: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)

    @property
    def waiting(self) -> int:
        """Bytes of an unfinished character; never more than three."""
        return len(self._decoder.getstate()[0])


class StopStrings:
    """Passes text through up to the first stop string, which it swallows.

    The first stop is the one that is complete first, the longest of several: the outcome does not
    depend on how the text was cut into pieces. Held back is only what may still become a stop: the
    longest end of the text that begins one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > STOPS_MAX:
            raise BadInput(f"{len(stops)} stop strings; at most {STOPS_MAX} are served")
        for stop in stops:
            if not 0 < len(stop) <= STOP_CHARS_MAX:
                raise BadInput(f"a stop string of {len(stop)} characters, not 1..{STOP_CHARS_MAX}")
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to give out; nothing after a hit."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = first_mark(text, self._stops)
        if found is not None:
            begin, self.hit = found
            self._held = ""
            return text[:begin]
        held = held_chars(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text ended: what was held back was no stop."""
        held, self._held = self._held, ""
        return held
