"""Where a growing text stops. Needs no torch: the server reads on its side of the wire.

What is given out never depends on how the text was cut into pieces: the first stop is the one that
is complete first, the longest of several that end together, and only the longest end of the text
that may still become one is held back (`ess.models.detokenizer.StopStrings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ess.models.detokenizer import Detokenizer, StopStrings

if TYPE_CHECKING:
    from ess.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Released:
    """Text that is safe to show, and the stop string that ended it."""

    text: str
    stopped: str | None = None


class StopText:
    """`keep` leaves the stop string at the end of the text."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = StopStrings(stops)
        self._keep = keep

    def feed(self, text: str) -> Released:
        """After a stop nothing is released any more."""
        was_stopped = self._stops.hit is not None
        released = self._stops.push(text)
        if self._keep and not was_stopped:
            released += self._stops.hit or ""
        return Released(released, self._stops.hit)

    def flush(self) -> str:
        """The text has ended: what was held back was no stop."""
        return self._stops.finish()


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

    def finish(self) -> None:
        """The last token has been made; what was held back belongs to the text."""
        self.text += self._stops.feed(self._detokenizer.finish()).text + self._stops.flush()


def check_stops(stops: Sequence[str]) -> None:
    """Refuses what no text can be searched for."""
    StopStrings(stops)
