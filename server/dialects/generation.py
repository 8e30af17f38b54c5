"""One answer as it grows: ids to text, up to a stop string or the engine's own end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from ess.engine.process.messages import Piece
from ess.engine.requests.request import FinishReason
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.stops import Released, StopText
from ess.models.text.detokenizer import Detokenizer
from ess.models.text.tokenizer import Tokenizer

Finish = Literal["stop", "length", "abort"]
FINISH_OF: Final[Mapping[FinishReason, Finish]] = {
    "length": "length",
    "stop": "stop",
    "cancelled": "abort",
    "refused": "abort",
    "failed": "abort",
    "sent": "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an answer may end: `keep_stop` leaves the stop string or token in the text. `form_field`
    is the field that its grammar came in."""

    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    tokens_min: int = 0
    keep_stop: bool = False
    keep_special: bool = False
    form_field: str = ""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What a piece of output added. `stopped_by` is the stop string or stop token that ended it."""

    text: str
    tokens: tuple[int, ...]
    chances: tuple[Chance, ...] = ()
    finish: Finish | None = None
    stopped_by: str | int | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """`cached_count` is known with the first piece, all `prompt_chances` with the first token.
    `chances` are not kept for a stream that sends each log probability once."""

    tokenizer: Tokenizer
    ending: Ending
    cached_count: int = 0
    keeps_chances: bool = True
    finish: Finish | None = None
    stopped_by: str | int | None = None
    tokens: list[int] = field(default_factory=list)
    chances: list[Chance] = field(default_factory=list)
    prompt_chances: list[Chance] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _text: Detokenizer = field(init=False)
    _stops: StopText = field(init=False)
    _stopped: str | None = None

    def __post_init__(self) -> None:
        self._text = Detokenizer(self.tokenizer, keep_special=self.ending.keep_special)
        self._stops = StopText(self.ending.stops, keep=self.ending.keep_stop)

    @property
    def is_stopped_early(self) -> bool:
        """Whether a stop string ended the answer before the engine did."""
        return self._stopped is not None

    @property
    def made_count(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        """It is joined once: a reader may ask for it after each piece."""
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def count_up_to(self, part: str) -> int:
        """How many tokens the answer had at the end of this part of its text. Special tokens count
        even where they are no part of the text."""
        if not part:
            return 0
        begin = max(0, self.text.find(part))
        left = len((self.text[:begin] + part).encode("utf-8", "replace"))
        hidden = frozenset() if self.ending.keep_special else self.tokenizer.special_ids
        for count, token in enumerate(self.tokens, start=1):
            left -= 0 if token in hidden else len(self.tokenizer.bytes_of(token))
            if left <= 0:
                return count
        return len(self.tokens)

    def feed(self, piece: Piece) -> Delta:
        """The delta of a piece; empty once the answer has ended."""
        if self.finish is not None:
            return Delta("", ())
        if piece.cached_count is not None:
            self.cached_count = piece.cached_count
        self.prompt_chances.extend(piece.prompt_chances)
        delta = self._grow(piece)
        self.tokens += delta.tokens
        if self.keeps_chances:
            self.chances += delta.chances
        self._texts.append(delta.text)
        self.finish, self.stopped_by = delta.finish, delta.stopped_by
        return delta

    def _grow(self, piece: Piece) -> Delta:
        shown = piece.tokens
        if piece.reason == "stop" and not self.ending.keep_stop:
            shown = shown[:-1]
        if not self.ending.stops:
            return self._end(piece, self._text.push(shown))
        text = ""
        for count, token in enumerate(shown, start=1):
            fresh = self._text.push((token,))
            if self.made_count + count <= self.ending.tokens_min:
                text += fresh
                continue
            released = self._stops.feed(fresh)
            text += released.text
            if released.stopped is not None:
                self._stopped = released.stopped
                kept, chances = piece.tokens[:count], piece.chances[:count]
                return Delta(text, kept, chances, "stop", released.stopped)
        return self._end(piece, text)

    def _end(self, piece: Piece, text: str) -> Delta:
        if piece.reason is None:
            return Delta(text, piece.tokens, piece.chances)
        rest = self._rest(piece)
        text += rest.text
        if rest.stopped is not None:
            return Delta(text, piece.tokens, piece.chances, "stop", rest.stopped)
        last = piece.tokens[-1] if piece.reason == "stop" and piece.tokens else None
        named = last if last in self.ending.stop_ids else None
        return Delta(text, piece.tokens, piece.chances, FINISH_OF[piece.reason], named)

    def _rest(self, piece: Piece) -> Released:
        """The end of the text. U+FFFD for a character that is unfinished there may complete a stop
        string; the text of an answer that was broken off is only given out."""
        made_count = self.made_count + len(piece.tokens)
        may_stop = piece.reason in ("length", "stop") and made_count > self.ending.tokens_min
        return self._stops.end(self._text.finish(), may_stop=may_stop)
