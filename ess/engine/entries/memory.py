"""The states that requests keep beside their rows, as the engine reads and writes them for a whole
batch.

All of it is one matrix, a row of which is a row of a window or an entry: attention reads both in
place. A token is written to its lines before anything reads them, so a window of n tokens is n
lines of its ring, the token's own among them.

A step may verify drafts. Their lines, and entries of 128 tokens that they close, are written like
all others: each query reads those of tokens up to its own, by its position alone. When the step has
decided how many tokens stay, the state's length grows by as many. The next step begins there and
overwrites all that lies beyond before it reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.door import Offload, Step
from ess.models.compressed.compressor import Compressor
from ess.models.compressed.form import HEADER_BYTES, VALUE_BYTES, Name, entry_pages, state_form
from ess.models.config import ModelConfig
from ess.models.layers import RotaryPositions

HEADER_UNITS: Final = 1


class Memory:
    """`rows` are all units as bytes, `lines` [sequences, lines, width] those of each field."""

    def __init__(self, offload: Offload, config: ModelConfig) -> None:
        own = config.compressed
        assert own is not None, "memory of another family"
        verified_max, held = offload.layout.verified_max, offload.beside
        self.has_module = verified_max > 1
        if not self.has_module:
            config = config.without_mtp()
        self.form = form = state_form(config, drafts=verified_max)
        assert form.byte_count == offload.layout.state_bytes, "a layout of another model"
        self.pages = entry_pages(config)
        self.window, self.heavy_rate = own.window, own.heavy_rate
        self.rows = held.view(-1, VALUE_BYTES * form.unit)
        self._values = held.view(torch.float32)
        self.line_units = self._values.shape[1] // form.unit
        self.headers = held[:, :HEADER_BYTES].view(torch.int64)
        self.first_entry = HEADER_UNITS + form.values // form.unit
        """The unit of a line at which entries begin that all tokens attend to."""
        self.lines: Mapping[tuple[Name, int], Tensor] = {
            (field.name, field.layer): self._lines(field.lines, field.width, at)
            for field, at in (form.place(f.name, f.layer) for f in form.fields)
        }

    def _lines(self, lines: int, width: int, at: int) -> Tensor:
        count, apart = self._values.shape
        first = HEADER_UNITS * self.form.unit + at
        return self._values.as_strided((count, lines, width), (apart, width, 1), first)

    def window_unit(self, layer: int) -> int:
        """The unit of a line at which this layer's window begins."""
        return HEADER_UNITS + self.form.offset("window", layer) // self.form.unit

    def entries(self, layer: int, line: int, numbers: Tensor) -> Tensor:
        """The rows of this matrix that hold entries of one sequence."""
        rows: Tensor = self.pages.unit(layer, numbers) + (line * self.line_units + self.first_entry)
        return rows

    def put_entries(self, rows: Tensor, entries: Tensor) -> None:
        self.rows.view(torch.float32)[rows] = entries

    def keep(self, step: Step, accepted: list[int]) -> None:
        """Called when all layers have the tokens of the step: each sequence keeps its first
        `accepted`."""
        lines = torch.as_tensor(step.query_line).long()[list(step.firsts)]
        lengths, written = self.headers[lines].unbind(1)
        ends = torch.maximum(written, lengths + torch.tensor(step.query_counts))
        self.headers[lines] = torch.stack((lengths + torch.tensor(accepted), ends), 1)


@dataclass(frozen=True, slots=True)
class Closing:
    """The tokens of a step that are the last of an entry of one rate, and the entries' numbers."""

    which: Tensor
    numbers: Tensor


class Tokens:
    """Some tokens of sequences, each in its `line`, and where their rows and entries lie."""

    def __init__(self, memory: Memory, positions: Tensor, line: Tensor) -> None:
        self.memory, self.positions, self._line = memory, positions, line
        self._first = line * memory.line_units
        self._windows = self._in_windows(memory.window)
        self._closing: dict[int, Closing] = {}

    @classmethod
    def of(cls, memory: Memory, step: Step) -> Tokens:
        """The tokens of a step: for each sequence the tokens behind its state."""
        positions, line = torch.as_tensor(step.positions), torch.as_tensor(step.query_line)
        tokens = cls(memory, positions.long(), line.long())
        firsts = list(step.firsts)
        held = memory.headers[tokens._line[firsts], 0]
        assert torch.equal(held, tokens.positions[firsts]), f"states of {held.tolist()} tokens"
        return tokens

    def behind(self, which: Sequence[int]) -> Tokens:
        """The token behind each of these."""
        return Tokens(self.memory, self.positions[list(which)] + 1, self._line[list(which)])

    def _in_windows(self, window: int) -> tuple[Tensor, Tensor]:
        """Where in a ring the window of each token stands, oldest token first; and which of those
        tokens are there."""
        lines = window - 1 + self.memory.form.drafts
        last = self.positions[:, None] - torch.arange(window - 1, -1, -1)
        return self._first[:, None] + last % lines, last >= 0

    def closing(self, rate: int) -> Closing:
        if rate not in self._closing:
            which = ((self.positions + 1) % rate == 0).nonzero()[:, 0]
            self._closing[rate] = Closing(which, self.positions[which] // rate)
        return self._closing[rate]

    def write(self, name: Name, layer: int, values: Tensor) -> None:
        lines = self.memory.lines[name, layer]
        lines[self._line, self.positions % lines.shape[1]] = values

    def seen(self, layer: int, *, entries: bool = False) -> Tensor:
        """Rows of the memory that each token attends to: its window in this layer, and behind it
        all entries, -1 padded."""
        rows, is_row = self._windows
        slots = (rows + self.memory.window_unit(layer)).where(is_row, -1)
        if entries:
            slots = torch.cat((slots, self._all_entries(layer)), 1)
        return slots.int()

    def _all_entries(self, layer: int) -> Tensor:
        counts = (self.positions + 1) // self.memory.heavy_rate
        numbers = torch.arange(int(counts.max()))
        rows = self._first[:, None] + self.memory.entries(layer, 0, numbers)
        return rows.where(numbers < counts[:, None], -1)

    def compressed(
        self,
        name: Name,
        layer: int,
        compressor: Compressor,
        hidden: Tensor,
        positions: RotaryPositions,
    ) -> Tensor:
        """Writes what the tokens contribute; returns the entries that tokens complete, in their
        order."""
        self.write(name, layer, compressor.tokens(hidden))
        which, numbers = (closing := self.closing(compressor.rate)).which, closing.numbers
        lines = self.memory.lines[name, layer]
        if not len(which):
            return hidden.new_empty(0, compressor.dim)
        last = self.positions[which][:, None] - torch.arange(compressor.span - 1, -1, -1)
        windows = lines[self._line[which][:, None], last % lines.shape[1]]
        return compressor.made(windows, numbers, positions)

    def store(self, layer: int, rate: int, entries: Tensor) -> None:
        """Stores the entries that all tokens attend to."""
        which, numbers = (closing := self.closing(rate)).which, closing.numbers
        rows = self._first[which] + self.memory.entries(layer, 0, numbers)
        self.memory.put_entries(rows, entries)
