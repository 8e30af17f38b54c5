"""Text to ids and back, from the `tokenizers` library's JSON file.

Only byte-level vocabularies are read, which is what the served families have: there a token *is* a
string of bytes, so a stream of ids can be turned into text exactly, without decoding a window of
tokens again at every step (`ess.models.text.detokenizer`).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from typing import Any, Final

import tokenizers

from ess.errors import BadInput
from ess.models.weights.files.folder import Folder
from ess.models.weights.files.strict_json import parse_object
from ess.units import shown

TOKENIZER_FILE: Final = "tokenizer.json"
IDS_MAX: Final = 1 << 24


class Tokenizer:
    """The vocabulary of a checkpoint folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = Folder(path)
        try:
            raw = folder.read(TOKENIZER_FILE)
        finally:
            folder.close()
        description = parse_object(raw, what=TOKENIZER_FILE)
        _check_byte_level(description.get("decoder"))
        self._library = _load(raw.decode("utf-8"))
        self._loses_text = _loses_text(description)
        self._added = dict(self._library.get_added_tokens_decoder())
        self.special_ids = frozenset(
            token_id for token_id, token in self._added.items() if token.special
        )
        self.special_texts = frozenset(
            str(self._added[token_id].content) for token_id in self.special_ids
        )
        self.added_texts = frozenset(str(token.content) for token in self._added.values())
        self._length = _length(self._library)
        self._bytes_of: dict[int, bytes] = {}
        self._text_of: dict[int, str | None] = {}

    def __len__(self) -> int:
        """Ids are below this, added tokens included, also where some numbers are no token's."""
        return self._length

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """`add_special` also adds what the file's post-processor wants, such as a first token."""
        try:
            return list(self._library.encode(text, add_special_tokens=add_special).ids)
        except (TypeError, UnicodeError) as error:
            raise BadInput(f"the text cannot be encoded: {error}") from None

    def encode_quoted(self, text: str, separator: str) -> list[int]:
        """As `encode`, but a special token that `separator` splits is the text that it looks like.

        Special tokens cut a text into pieces that are encoded each by itself, so cutting it here
        gives the ids that the library gives.
        """
        specials = [special for special in self.special_texts if special in text]
        longest_first = sorted(specials, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        ids = []
        for piece in re.split(f"({pattern})", text):
            token_id = self.id_of(piece) if piece in self.special_texts else None
            spelled = piece.replace(separator, "")
            ids += [token_id] if token_id is not None else self._encode_plain(spelled)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        self._library.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self._library.encode_special_tokens = False

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of all ids at once; bytes that are not UTF-8 become U+FFFD."""
        skipped = frozenset() if keep_special else self.special_ids
        try:
            joined = b"".join(self.bytes_of(each) for each in ids if each not in skipped)
        except TypeError as error:
            raise BadInput(f"ids is {shown(ids)}, must be a list of token ids") from error
        return joined.decode("utf-8", "replace")

    def to_json(self) -> str:
        """What another process needs to encode in the same way."""
        return str(self._library.to_str())

    @functools.cached_property
    def longest_chars(self) -> int | None:
        """No token stands for more characters; None where encoding may drop some of a text."""
        spelled = self._library.get_vocab(with_added_tokens=True)
        if self._loses_text or not spelled.keys() >= byte_alphabet().keys():
            return None
        return max(map(len, spelled))

    def id_of(self, token: str) -> int | None:
        token_id = self._library.token_to_id(token)
        return None if token_id is None else int(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id without a token (a padded vocabulary has some)."""
        try:
            token_bytes = self._bytes_of.get(token_id)
            if token_bytes is None:
                token_bytes = self._bytes_of[token_id] = self._look_up(token_id)
        except TypeError as error:
            raise BadInput(f"{shown(token_id)} is not a token id") from error
        return token_bytes

    def text_of(self, token_id: int) -> str | None:
        """The text of one token if its bytes are whole characters, else None."""
        try:
            return self._text_of[token_id]
        except KeyError:
            text = self._text_of[token_id] = _text(self.bytes_of(token_id))
            return text

    def _look_up(self, token_id: int) -> bytes:
        if not 0 <= token_id < 1 << 31:
            raise BadInput(f"{token_id} is not a token id")
        if token_id in self._added:
            return str(self._added[token_id].content).encode("utf-8")
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        alphabet = byte_alphabet()
        if all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return str(token).encode("utf-8")


def _text(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: a visible Latin-1 character stands for itself, the
    other 68 bytes, in order, for the characters from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }


def _check_byte_level(decoder: Any) -> None:
    steps = decoder.get("decoders") if _kind(decoder) == "Sequence" else [decoder]
    kinds = [_kind(step) for step in steps] if isinstance(steps, list) else []
    if "ByteLevel" not in kinds or not set(kinds) <= {"ByteLevel", "Fuse"}:
        raise BadInput(
            f"{TOKENIZER_FILE} decodes by {kinds}; only byte-level ones ('ByteLevel') are read"
        )


def _loses_text(description: dict[str, Any]) -> bool:
    """Whether a text may be longer than its tokens together: a normaliser shortens it, a splitter
    removes what it splits at, or an added token takes the white space beside it."""
    normalizer = description.get("normalizer")
    if normalizer is not None and normalizer != {"type": "Sequence", "normalizers": []}:
        return True
    added = description.get("added_tokens") or ()
    strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
    return strips or "'Removed'" in repr(description.get("pre_tokenizer"))


def _kind(decoder: Any) -> str:
    return str(decoder.get("type"))[:40] if isinstance(decoder, dict) else "nothing"


def _length(library: tokenizers.Tokenizer) -> int:
    length = 1 + max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    if length > IDS_MAX:
        raise BadInput(f"{TOKENIZER_FILE} has the id {length - 1:,}; ids are below {IDS_MAX:,}")
    return length


def _load(text: str) -> tokenizers.Tokenizer:
    """The library panics on some malformed files; a panic is not an Exception."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise BadInput(f"{TOKENIZER_FILE} is not a vocabulary: {str(error)[:200]}") from None
