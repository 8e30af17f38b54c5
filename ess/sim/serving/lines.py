"""A replay over time, of any length, in a few hundred spans.

Every step is added. When there are too many spans, neighbours are merged: seconds are summed, all
else is the mean over these seconds. So a long replay is as cheap to keep as a short one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

SPANS_MAX: Final = 512


class Span(NamedTuple):
    """A time, its length, and means over it: requests that decode, and that wait; missed rows per
    request and layer; the share of the step that waited for the link."""

    start_s: float
    seconds: float
    batch: float
    waiting: float
    misses: float
    exposed: float


@dataclass(slots=True)
class Lines:
    """Spans in order of time; the last one may still grow."""

    spans: list[Span] = field(default_factory=list)
    each: int = 1
    _last_count: int = 0

    def add(self, span: Span) -> None:
        """Adds a step; every `each` steps become a span."""
        if 0 < self._last_count < self.each:
            self.spans[-1] = merged(self.spans[-1], span)
        else:
            self.spans.append(span)
            self._last_count = 0
        self._last_count += 1
        if len(self.spans) > SPANS_MAX:
            pairs = zip(self.spans[::2], self.spans[1::2], strict=False)
            odd = self.spans[-1:] if len(self.spans) % 2 else []
            self.spans = [*(merged(first, second) for first, second in pairs), *odd]
            self.each *= 2


def merged(first: Span, second: Span) -> Span:
    """
    >>> merged(Span(0, 1, 10, 0, 0, 0), Span(1, 3, 2, 4, 0, 0.5))
    Span(start_s=0, seconds=4, batch=4.0, waiting=3.0, misses=0.0, exposed=0.375)
    """
    seconds = first.seconds + second.seconds
    share = second.seconds / seconds if seconds else 0.0

    def mean(before: float, after: float) -> float:
        return before + share * (after - before)

    return Span(
        first.start_s,
        seconds,
        mean(first.batch, second.batch),
        mean(first.waiting, second.waiting),
        mean(first.misses, second.misses),
        mean(first.exposed, second.exposed),
    )
