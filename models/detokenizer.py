"""Ids to text as they come.

A character may be spread over tokens, and a token may hold parts of two characters. The text given
out is always whole characters; what waits is at most three bytes, the longest unfinished UTF-8
sequence, so the look-back is bounded whatever the ids are. Joined, the pieces equal
`Tokenizer.decode` of all ids: a byte sequence that can no longer become a character gives U+FFFD as
soon as that is certain.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ess.models.tokenizer import Tokenizer


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
