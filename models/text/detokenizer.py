"""Ids to text as they come.

A character may be spread over tokens, and a token may hold parts of two characters. The text given
out is always whole characters; what waits is at most three bytes, the longest unfinished UTF-8
sequence, so the look-back is bounded whatever the ids are. Joined, the pieces equal
`Tokenizer.decode` of all ids: a byte sequence that can no longer become a character gives U+FFFD as
soon as that is certain.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ess.errors import BadInput
from ess.units import shown

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence of ids."""

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset[int]() if keep_special else tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True

    def push(self, ids: Sequence[int]) -> str:
        """The whole characters that these ids complete; often empty.

        Where no character has begun, an id that is whole characters by itself is its own text.
        """
        try:
            if self._is_whole and len(ids) == 1 and ids[0] not in self._skipped:
                text = self._tokenizer.text_of(ids[0])
                if text is not None:
                    return text
            fresh = [self._tokenizer.bytes_of(i) for i in ids if i not in self._skipped]
        except TypeError as error:
            raise BadInput(f"ids is {shown(ids)}, must be a list of token ids") from error
        text = self._decoder.decode(b"".join(fresh))
        self._is_whole = self.waiting == 0
        return text

    def finish(self) -> str:
        """What an unfinished character at the end is worth: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)

    @property
    def waiting(self) -> int:
        """Bytes of an unfinished character; never more than three."""
        return len(self._decoder.getstate()[0])
