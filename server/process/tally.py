"""What the server itself counts: answers, refusals, and how long clients waited."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

WAIT_BOUNDS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)


@dataclass(slots=True, eq=False)
class Waits:
    """A histogram of seconds: `counts[i]` waits took up to `WAIT_BOUNDS_S[i]`, the last longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, wait_s: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(WAIT_BOUNDS_S, wait_s)] += count
        self.total_s += wait_s * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0


@dataclass(slots=True, eq=False)
class Tally:
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)
    disconnect_count: int = 0
    connection_count: int = 0
    first_token: Waits = field(default_factory=Waits)
    between_tokens: Waits = field(default_factory=Waits)
    whole: Waits = field(default_factory=Waits)

    @property
    def failure_count(self) -> int:
        """Answers with status 500: faults of the server."""
        return sum(count for (_, status), count in self.answers.items() if status == 500)
