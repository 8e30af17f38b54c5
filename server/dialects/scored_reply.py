"""Replies as they are parsed, with the log probabilities of the tokens of messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ess.engine.tokens.chance import Chance
from ess.models.chat.reply import CallBegin, Content, Event, Reasoning, ReplyParser
from ess.models.text.detokenizer import Detokenizer
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects.logprobs import chat_entries


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """The tokens of a text that cannot be divided, and where it ends in the text of the reply."""

    tokens: tuple[int, ...]
    chances: tuple[Chance, ...]
    end: int


Scored = tuple[Event, list[msgspec.Raw]]
"""What a reply says, and for a message's text the log probabilities of its tokens, as JSON: objects
would be hundreds for a token, all alive until the answer ends and encoded for each of four events.
"""


class ScoredParser:
    """A parser of replies that gives each piece of a message's text the tokens that it is made of.

    The parser inside gets the text of one token at a time, so what it consumes in a turn is short.
    Where a piece lies follows from that: a piece that continues a message begins where the consumed
    text begins; the first piece of a message is at the end of the consumed text, behind the mark
    that opened the message.

    A token belongs to the first piece that has a character of it. A token without text, such as a
    part of a character, goes with the next token that has text. So the bytes of a piece's tokens,
    joined, contain the piece. Tokens of marks, reasoning, calls and the end are left out.

    `_given` is where the last token ends that was given out or dropped, `_open` the text that was
    pushed and not yet consumed.
    """

    def __init__(self, parser: ReplyParser, tokenizer: Tokenizer, *, keep_special: bool) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, keep_special=keep_special)
        self._textless: list[tuple[int, Chance]] = []
        self._placed: deque[PlacedTokens] = deque()
        self._ends: deque[int] = deque()
        self._length = 0
        self._given = 0
        self._pushed = 0
        self._open = ""
        self._is_speaking = False

    def push(self, text: str, tokens: Sequence[int], chances: Sequence[Chance]) -> list[Scored]:
        """`text` may lag behind the tokens, which may hold the beginning of a stop string."""
        for token, chance in zip(tokens, chances, strict=True):
            self._place(token, chance)
        heard: list[Scored] = []
        begin = self._pushed
        if begin + len(text) > self._length:
            self._place_end(begin + len(text))
        while self._ends and self._ends[0] < begin + len(text):
            heard += self._push_piece(text[self._pushed - begin : self._ends.popleft() - begin])
        return heard + self._push_piece(text[self._pushed - begin :])

    def finish(self) -> list[Scored]:
        return self._scored(self._parser.finish(), self._open)

    def _place(self, token: int, chance: Chance) -> None:
        self._textless.append((token, chance))
        fresh = self._detokenizer.push((token,))
        if fresh:
            self._length += len(fresh)
            tokens, chances = zip(*self._textless, strict=True)
            self._placed.append(PlacedTokens(tokens, chances, self._length))
            self._ends.append(self._length)
            self._textless = []

    def _place_end(self, length: int) -> None:
        """The text ends with what an unfinished character is worth, whose tokens had no text."""
        written = [pair for pair in self._textless if pair[0] not in self._tokenizer.special_ids]
        if written:
            tokens, chances = zip(*written, strict=True)
            self._placed.append(PlacedTokens(tokens, chances, length))
            self._ends.append(length)
        self._length, self._textless = length, []

    def _push_piece(self, piece: str) -> list[Scored]:
        self._open += piece
        self._pushed += len(piece)
        events = self._parser.push(piece)
        consumed = self._open[: len(self._open) - self._parser.held]
        heard = self._scored(events, consumed)
        self._open = self._open[len(consumed) :]
        self._drop(self._pushed - len(self._open))
        return heard

    def _scored(self, events: Sequence[Event], consumed: str) -> list[Scored]:
        """The events that the parser made of `consumed`, which begins where `_open` does."""
        heard: list[Scored] = []
        begin = self._pushed - len(self._open)
        for event in events:
            entries: list[msgspec.Raw] = []
            if isinstance(event, Content):
                goes_on = self._is_speaking and consumed.startswith(event.text)
                at = begin + (0 if goes_on else max(0, consumed.rfind(event.text)))
                entries = self._entries(at, at + len(event.text))
            if isinstance(event, Content | Reasoning | CallBegin):
                self._is_speaking = isinstance(event, Content)
            heard.append((event, entries))
        return heard

    def _drop(self, until: int) -> None:
        """Forgets tokens of what was consumed: no text to come has a character of them."""
        while self._placed and self._placed[0].end <= until:
            self._given = self._placed.popleft().end

    def _entries(self, begin: int, end: int) -> list[msgspec.Raw]:
        entries: list[msgspec.Raw] = []
        while self._placed and self._given < end:
            placed = self._placed.popleft()
            if placed.end > begin:
                made = chat_entries(self._tokenizer, placed.tokens, placed.chances)
                entries += (msgspec.Raw(msgspec.json.encode(entry)) for entry in made)
            self._given = placed.end
        return entries
