"""Log probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ess.engine.tokens.chance import Chance
from ess.models.chat.reply import CallBegin, Content, Event, Reasoning, ReplyParser
from ess.models.text.detokenizer import Detokenizer
from ess.models.text.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; bytes that are not valid text alone are written as escapes."""
    raw = tokenizer.bytes_of(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    chances: Sequence[Chance | None],
    offset: int,
    *,
    by_id: bool = False,
) -> dict[str, Any]:
    """Parallel lists; `offset` is where the first token's text begins. The first token of a text
    has no log probability. A token that was chosen is always in its top_logprobs, as with OpenAI:
    it is added if it is not among the likeliest.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token_text(tokenizer, token))
    return {
        "tokens": [_name(tokenizer, token, by_id) for token in tokens],
        "token_logprobs": [chance and chance.logprob for chance in chances],
        "top_logprobs": [
            chance
            and {
                _name(tokenizer, other, by_id): logprob
                for other, logprob in (*chance.top, (token, chance.logprob))
            }
            for token, chance in zip(tokens, chances, strict=True)
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], chances: Sequence[Chance], *, by_id: bool = False
) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(tokenizer, token, chance.logprob, by_id),
                "top_logprobs": [
                    _entry(tokenizer, other, value, by_id) for other, value in chance.top
                ],
            }
            for token, chance in zip(tokens, chances, strict=True)
        ],
        "refusal": None,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], chances: Sequence[Chance]
) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, by id, itself and the likeliest in its place. An
    aborted prompt has fewer."""
    entries: list[dict[str, Any] | None] = [None]
    for token, chance in zip(prompt[1:], chances, strict=False):
        ranked = [
            (token, logprob, rank) for rank, (token, logprob) in enumerate(chance.top, start=1)
        ]
        shown = [(token, chance.logprob, chance.rank), *ranked]
        entries.append(
            {
                str(token): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": token_text(tokenizer, token),
                }
                for token, logprob, rank in reversed(shown)
            }
        )
    return entries


@dataclass(frozen=True, slots=True)
class Placed:
    """The tokens of a text that cannot be divided, and where it ends in the text of the reply."""

    tokens: tuple[int, ...]
    chances: tuple[Chance, ...]
    end: int


Scored = tuple[Event, list[dict[str, Any]]]
"""What a reply says, and for a message's text the log probabilities of its tokens."""


class ScoredParser:
    """A parser that gives each text of a message with the tokens that the text is made of.

    The text is pushed token by token, so what one push has consumed is short: a text that goes on
    begins there, and one that is new ends there, behind a mark. A token belongs to the first text
    that has a character of it. A token without text, such as a part of a character, is placed with
    the next one. So the bytes of the tokens, joined, have the text in them; tokens of marks, of
    reasoning, of calls and of the end are left out.
    """

    def __init__(self, parser: ReplyParser, tokenizer: Tokenizer, *, keep_special: bool) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, keep_special=keep_special)
        self._textless: list[tuple[int, Chance]] = []
        self._placed: deque[Placed] = deque()
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
        while self._ends and self._ends[0] < begin + len(text):
            heard += self._pushed_piece(text[self._pushed - begin : self._ends.popleft() - begin])
        return heard + self._pushed_piece(text[self._pushed - begin :])

    def finish(self) -> list[Scored]:
        return self._scored(self._parser.finish(), self._open)

    def _place(self, token: int, chance: Chance) -> None:
        self._textless.append((token, chance))
        fresh = self._detokenizer.push((token,))
        if fresh:
            self._length += len(fresh)
            tokens, chances = zip(*self._textless, strict=True)
            self._placed.append(Placed(tokens, chances, self._length))
            self._ends.append(self._length)
            self._textless = []

    def _pushed_piece(self, piece: str) -> list[Scored]:
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
            entries: list[dict[str, Any]] = []
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

    def _entries(self, begin: int, end: int) -> list[dict[str, Any]]:
        entries = []
        while self._placed and self._given < end:
            placed = self._placed.popleft()
            if placed.end > begin:
                said = chat_logprobs(self._tokenizer, placed.tokens, placed.chances)
                entries += said["content"]
            self._given = placed.end
        return entries


def _name(tokenizer: Tokenizer, token: int, by_id: bool) -> str:
    """A token's text, or vLLM's way to write its id."""
    return f"token_id:{token}" if by_id else token_text(tokenizer, token)


def _entry(tokenizer: Tokenizer, token: int, logprob: float, by_id: bool) -> dict[str, Any]:
    return {
        "token": _name(tokenizer, token, by_id),
        "logprob": logprob,
        "bytes": list(tokenizer.bytes_of(token)),
    }
