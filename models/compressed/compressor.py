"""From tokens to entries: an entry mixes the tokens of its window, dimension by dimension.

A token gives a value and a gate for each dimension. An entry is the sum of its tokens' values, each
weighted by the softmax of their gates over the window, with a learned bias for each place in it;
then it is normed, and rotated as the window's first token is. Windows lie side by side, `rate`
tokens each. Where they overlap a token gives two series, A and B: entry e is made of A of window e
- 1 and B of window e together, the first entry of B alone.

No sum grows as tokens come: an entry is made once, from all its tokens. So a state that has the
last tokens' values and gates can drop tokens again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.layers import RotaryPositions, Source, linear, rms_norm, rotate_part


class Compressor:
    def __init__(
        self, config: ModelConfig, source: Source, *, rate: int, dim: int, overlaps: bool
    ) -> None:
        self.rate, self.dim, self.overlaps = rate, dim, overlaps
        self._config = config
        wide = (1 + overlaps) * dim
        self._values = source.weight("wkv", wide, config.hidden_dim)
        self._gates = source.weight("wgate", wide, config.hidden_dim)
        self._bias = source.values("ape", rate, wide)
        self._norm = source.vector("norm.weight", dim)

    @property
    def width(self) -> int:
        """The width of what is kept of a token: values, then gates."""
        return 2 * (1 + self.overlaps) * self.dim

    def tokens(self, hidden: Tensor) -> Tensor:
        """[tokens, width], of a layer's normed input."""
        return torch.cat((linear(hidden, self._values), linear(hidden, self._gates)), -1)

    @property
    def span(self) -> int:
        """How many tokens an entry is made of; the first entry has fewer, as no entry overlaps
        it."""
        return (1 + self.overlaps) * self.rate

    def first_token(self, entry: int) -> int:
        """The first token that `entry` is made of."""
        return max(entry - self.overlaps, 0) * self.rate

    def entries(self, tokens: Tensor, first: int, positions: RotaryPositions) -> Tensor:
        """From entry `first` on, of the tokens that begin at `first_token(first)`: as many as have
        all their tokens."""
        whole = len(tokens) // self.rate
        windows = tokens[: whole * self.rate].view(whole, self.rate, self.width)
        if self.overlaps:
            if first == 0:
                windows = torch.cat((torch.zeros_like(windows[:1]), windows))
            windows = torch.cat((windows[:-1], windows[1:]), 1)
        return self.made(windows, first + torch.arange(len(windows)), positions)

    def made(self, windows: Tensor, numbers: Tensor, positions: RotaryPositions) -> Tensor:
        """Entries of these numbers, of their tokens [entries, span, width]. What stands before the
        first window of a sequence is not read."""
        values, gates = windows.chunk(2, -1)
        if self.overlaps:
            values, gates = self._overlapping(values, gates, has_before=numbers > 0)
        else:
            gates = gates + self._bias
        mixed = (values * gates.softmax(1)).sum(1)
        normed = rms_norm(mixed, self._norm, self._config.norm_eps)
        at, dim = self.dim - self._config.rope_dim, self._config.rope_dim
        rotation = positions.at(numbers * self.rate)
        return rotate_part(normed, rotation, "interleaved", at=at, dim=dim)

    def _overlapping(
        self, values: Tensor, gates: Tensor, *, has_before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A of the window before, then B of its own. Without a window before it, its A are gates
        that weigh nothing."""
        dim, rate, bias = self.dim, self.rate, self._bias
        is_there = has_before[:, None, None]
        before = values[:, :rate, :dim].where(is_there, 0.0)
        weights = (gates[:, :rate, :dim] + bias[:, :dim]).where(is_there, -torch.inf)
        own = gates[:, rate:, dim:] + bias[:, dim:]
        return torch.cat((before, values[:, rate:, dim:]), 1), torch.cat((weights, own), 1)
