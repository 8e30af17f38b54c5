"""What requests keep beside their rows, where tokens have rows of their own.

The fields of a state are those of `ess.models.config_json.linear`.

A state belongs to one length. A step brings one token of each of its sequences, which is never
taken back: it is the request's newest token. Preemption, forks and copies kept for prompts wait
until the steps under way are learned. So every layer writes its state in place, and the length in a
line's header is written when all layers have: a step or chunk that begins at another length, or
behind one that did not finish, is noticed at once as a fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ess.door import Offload
from ess.models.config import ModelConfig
from ess.models.config_json.linear import StateForm
from ess.models.decoder import DecoderLayer
from ess.models.indexer import pooled

if TYPE_CHECKING:
    from ess.door import Step


class Beside:
    """All lines at once: `lengths` [lines], and each layer's fields by name, [lines, *shape]."""

    def __init__(self, form: StateForm, held: Tensor) -> None:
        """`held` uint8 [lines, bytes]."""
        self.lengths = held[:, :8].view(torch.int64)[:, 0]
        self._fields = defaultdict[int, dict[str, Tensor]](dict)
        for each, at in zip(form.fields, form.offsets(), strict=True):
            values = _values(held[:, at : at + each.byte_count], each.shape)
            self._fields[each.layer][each.name] = values

    def of(self, layer: DecoderLayer) -> Mapping[str, Tensor]:
        assert layer.place in self._fields, f"layer {layer.place} keeps no state"
        return self._fields[layer.place]


def _values(held: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of `held` as float32 [lines, *shape]."""
    return held.view(torch.float32).view(len(held), *shape)


def beside_of(config: ModelConfig, offload: Offload) -> Beside | None:
    """The states beside rows; None where requests keep nothing of this kind."""
    form = config.states
    return Beside(form, offload.beside) if form.fields else None


@dataclass(frozen=True, slots=True)
class Carried:
    """The states of some sequences, in these `lines`, that run on together, each by as many tokens,
    and where these begin: `starts`."""

    beside: Beside
    lines: Tensor
    starts: Tensor

    @classmethod
    def of_step(cls, beside: Beside, step: Step) -> Carried:
        assert set(step.query_counts) == {1}, f"{step!r} verifies drafts"
        lines, positions = torch.as_tensor(step.query_line), torch.as_tensor(step.positions)
        return cls(beside, lines.long(), positions.long())

    def part(self, which: slice) -> Carried:
        return Carried(self.beside, self.lines[which], self.starts[which])

    def begin(self) -> None:
        lengths = self.beside.lengths[self.lines]
        assert torch.equal(lengths, self.starts), f"states of {lengths.tolist()} tokens"

    def end(self, count: int) -> None:
        """The states of all layers have taken `count` more tokens."""
        self.beside.lengths[self.lines] = self.starts + count

    def through(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """The values that the tokens read from the layer's states, [tokens, ...], sequence after
        sequence."""
        held = self.beside.of(layer)
        state = {name: lines[self.lines] for name, lines in held.items()}
        read, after = layer.carry(hidden.view(len(self.lines), -1, hidden.shape[1]), state)
        for name, lines in held.items():
            lines[self.lines] = after[name]
        return read.flatten(0, 1)

    def unit_keys(self, layer: DecoderLayer, given: Tensor) -> Tensor:
        """A key for each token that is the last of its unit, zeros for the others; `given` is what
        each token gives to the key of its unit, [tokens, 2 * dim]."""
        last = self.beside.of(layer)["unit"]
        new = given.view(len(self.lines), -1, given.shape[1])
        joined, count, unit = torch.cat((last[self.lines], new), 1), new.shape[1], last.shape[1] + 1
        last[self.lines] = joined[:, count:]
        ends = (self.starts[:, None] + torch.arange(1, count + 1)) % unit == 0
        units = joined.unfold(1, unit, 1)[ends].transpose(1, 2)
        keys = given.new_zeros(len(self.lines), count, given.shape[1] // 2)
        keys[ends] = pooled(units.flatten(0, 1), unit)
        return keys.flatten(0, 1)
