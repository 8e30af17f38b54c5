"""Whether steps are held: decided by the engine, remembered by all of its server's processes.

The engine dates each word with the machine's monotonic clock, which all of them read. The latest
word counts. When an engine replaces a lost one, each process repeats what it remembers, with its
date. A repetition that comes late is older than what a client has asked of the new engine, and
changes nothing; so does the repetition of a process that has missed the last word. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """`at_s` is the date of the last word; 0 before the first."""

    is_on: bool = False
    at_s: float = 0.0

    def hear(self, *, is_on: bool, at_s: float) -> None:
        """Takes a word, unless a later one is known."""
        if at_s >= self.at_s:
            self.is_on, self.at_s = is_on, at_s
