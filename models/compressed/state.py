"""The state of one request beside its entries: one tensor, filled as `StateForm` says."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.models.compressed.form import HEADER_BYTES, VALUE_BYTES, Field, Name, StateForm


class State:
    """Lines of tokens at `length` and beyond it are there and mean nothing; no layer reads them.

    A token that is written takes the line of the token `lines` before it. So of a field the tokens
    from `written` - `lines` on can be read, where `written` is how far lines were ever written:
    taking tokens back does not bring back what they have overwritten.
    """

    def __init__(self, form: StateForm, memory: Tensor | None = None) -> None:
        """The state lies in `memory`, uint8 [form.byte_count] or more: zeros, or what another state
        has left."""
        self.form = form
        if memory is None:
            memory = torch.full((form.byte_count,), 0xFF, dtype=torch.uint8)
            memory[:HEADER_BYTES] = 0
        self._header = memory[:HEADER_BYTES].view(torch.int64)
        values = memory[VALUE_BYTES * form.unit : form.byte_count]
        self._values = values.view(torch.float32)

    @property
    def length(self) -> int:
        return int(self._header[0])

    def ring(self, name: Name, layer: int) -> Ring:
        """A field of one layer. It stays valid over `load`."""
        return Ring(self, *self.form.place(name, layer))

    def lines(self, field: Field, at: int) -> Tensor:
        return self._values[at : at + field.values].view(field.lines, field.width)

    @property
    def written(self) -> int:
        return int(self._header[1])

    def _set(self, length: int, written: int) -> None:
        self._header[0], self._header[1] = length, written

    def advance(self, count: int) -> None:
        """The lines of `count` more tokens have been written in all fields."""
        length = self.length + count
        self._set(length, max(self.written, length))

    def cut(self, length: int) -> None:
        """Take back the tokens from `length` on: no more than drafts, since others are gone."""
        least = max(0, self.written - self.form.drafts)
        if not min(least, self.length) <= length <= self.length:
            raise BadInput(
                f"a state of {self.length} tokens cannot be cut to {length}: lines of"
                f" {self.form.drafts} drafts are kept, {self.written} tokens were written"
            )
        self._set(length, self.written)

    def copy(self) -> State:
        other = State(self.form)
        other.load(self.save())
        return other

    def save(self) -> bytes:
        """The state as bytes: equally many at any length."""
        header = struct.pack("<qq", self.length, self.written)
        return header + self._values.numpy().tobytes()

    def load(self, saved: bytes) -> None:
        needed = HEADER_BYTES + VALUE_BYTES * self.form.values
        if len(saved) != needed:
            raise BadInput(f"a saved state has {len(saved):,} bytes, expected {needed:,}")
        length, written = struct.unpack("<qq", saved[:HEADER_BYTES])
        if not 0 <= length <= written <= length + self.form.drafts:
            raise BadInput(f"a saved state of {length} tokens says that {written} were written")
        held = torch.frombuffer(bytearray(saved[HEADER_BYTES:]), dtype=torch.float32)
        self._set(length, written)
        self._values.copy_(held)


class Ring:
    """One field of a state, by positions of tokens."""

    def __init__(self, state: State, field: Field, at: int) -> None:
        self._state, self._field, self._at = state, field, at

    def read(self, start: int, stop: int | None = None) -> Tensor:
        """What the field has of the tokens from `start` to the state's length, or to `stop`, which
        a field that is written after the others needs."""
        state, lines = self._state, self._field.lines
        written = state.written if stop is None else stop
        assert start >= written - lines, f"token {start} is gone: {written} written"
        places = torch.arange(start, state.length if stop is None else stop) % lines
        return state.lines(self._field, self._at)[places]

    def write(self, values: Tensor, first: int | None = None) -> None:
        """Writes the values of the tokens after the state's length, or from `first` on; if there
        are fewer lines, of the last tokens."""
        lines = self._field.lines
        first = self._state.length if first is None else first
        last = values[-lines:]
        stop = first + len(values)
        places = torch.arange(stop - len(last), stop) % lines
        self._state.lines(self._field, self._at)[places] = last
