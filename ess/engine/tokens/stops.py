"""Where a growing text stops. Needs no torch: the server reads on its side of the wire.

What is given out never depends on how the text was cut into pieces: the first stop is the one that
is complete first, and of several stops that end together the longest. Text is held back only while
it may still become a stop: the longest end of the text with which a stop begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ess.errors import BadInput
from ess.models.text.detokenizer import Detokenizer
from ess.models.text.marks import first_mark, held_chars

if TYPE_CHECKING:
    from ess.models.text.tokenizer import Tokenizer

STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Released:
    """Text that is safe to show, and the stop string that ended it."""

    text: str
    stopped: str | None = None


class StopText:
    """`keep` leaves the stop string at the end of the text."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        check_stops(stops)
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self._stopped: str | None = None

    def feed(self, text: str) -> Released:
        """After a stop nothing is released any more."""
        if self._stopped is not None:
            return Released("", self._stopped)
        text = self._held + text
        first = first_mark(text, self._stops)
        if first is not None:
            begin, self._stopped = first
            assert self._stopped in self._stops, f"{self._stopped!r} is no stop"
            self._held = ""
            end = begin + len(self._stopped) if self._keep else begin
            return Released(text[:end], self._stopped)
        end = len(text) - held_chars(text, self._stops)
        assert 0 <= end <= len(text), f"{len(text) - end} of {len(text)} characters are held back"
        self._held = text[end:]
        return Released(text[:end])

    def end(self, text: str = "", *, may_stop: bool) -> Released:
        """The text ends with `text`, which completes no stop unless it `may_stop`, and what is held
        then is none."""
        if may_stop:
            released = self.feed(text)
        else:
            released, self._held = Released(""), self._held + text
        held, self._held = self._held, ""
        return Released(released.text + held, released.stopped)

    def check(self) -> None:
        assert self._stopped is None or not self._held, "text is held back behind the stop"
        assert first_mark(self._held, self._stops) is None, f"{self._held!r} has a stop"
        assert held_chars(self._held, self._stops) == len(self._held), f"{self._held!r} begins none"


class Reader:
    """The text of one request, read from its tokens as they are made, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopText(stops)
        self.text = ""

    def read(self, token: int, *, may_stop: bool) -> str | None:
        """The stop string that this token completes. Text made before it may stop is no stop."""
        fresh = self._detokenizer.push([token])
        if not may_stop:
            self.text += fresh
            return None
        released = self._stops.feed(fresh)
        self.text += released.text
        return released.stopped

    def finish(self, *, may_stop: bool) -> str | None:
        """The last token has been made; what was held back belongs to the text. So does U+FFFD for
        a character that is unfinished: the stop string that it completes, if the text may stop."""
        released = self._stops.end(self._detokenizer.finish(), may_stop=may_stop)
        self.text += released.text
        return released.stopped

    def check(self) -> None:
        self._stops.check()


def check_stops(stops: Sequence[str]) -> None:
    """BadInput for too many stop strings, and for one that is empty or too long."""
    if len(stops) > STOPS_MAX:
        raise BadInput(f"stop has {len(stops)} stop strings; at most {STOPS_MAX} are served")
    for stop in stops:
        if not 0 < len(stop) <= STOP_CHARS_MAX:
            raise BadInput(f"stop has a string of {len(stop)} characters, not 1..{STOP_CHARS_MAX}")
