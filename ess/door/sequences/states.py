"""The states that sequences keep on the device beside their rows: a line of bytes for each active
sequence.

What the bytes mean is their engine's; how many there are the layout says. A line of the page tables
comes with a line of these, so that a sequence gets both or neither.
"""

from __future__ import annotations

import numpy as np

from ess.array_types import Bytes
from ess.door.sequences.kept import KeptStates
from ess.layout import ModelLayout


class States:
    """`kept` are those that prompts to come may begin with: as many bytes as the lines have."""

    def __init__(self, layout: ModelLayout, *, sequence_max: int, length_max: int) -> None:
        self._layout = layout
        shape = sequence_max, layout.request_state_bytes(length_max)
        self.lines: Bytes = np.empty(shape, np.uint8)
        self.kept = KeptStates(self.lines.nbytes)

    def line(self, line: int, length: int | None) -> Bytes:
        """The state in this line, of a sequence of at most `length` tokens; None: the whole
        line."""
        if length is None:
            whole: Bytes = self.lines[line]
            return whole
        mine: Bytes = self.lines[line, : self._layout.request_state_bytes(length)]
        return mine

    def enter(self, line: int, saved: Bytes | None) -> None:
        """A sequence begins with zeros in the bytes that every sequence has, or continues with a
        saved state. Bytes behind these, which the line's former sequence wrote, become NaN."""
        count = self._layout.state_bytes if saved is None else len(saved)
        self.lines[line, :count] = 0 if saved is None else saved
        self.lines[line, count:] = 0xFF

    def copy(self, source: int, target: int) -> None:
        self.lines[target] = self.lines[source]
